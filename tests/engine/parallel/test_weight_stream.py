"""The two ways of buckets to shards: no rank waits for one that failed, and memory stays small.

Values on meshes are compared in test_materialize.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsdpbench.engine.device import Device
from fsdpbench.engine.models.preset_files import prepare_preset
from fsdpbench.engine.parallel.bucket_reader import MemorySource
from fsdpbench.engine.parallel.weight_buckets import Span, plan_buckets
from fsdpbench.engine.parallel.weight_stream import read_buckets
from fsdpbench.engine.parallel.weight_targets import ShardTarget
from tests.distributed.pool import run_on_ranks

FAULTS = "tests.distributed.payloads.parallel_weights_faults"
HOST = "tests.distributed.payloads.parallel_weights_host"
WEIGHTS = "tests.distributed.payloads.parallel_weights"
MIB = 1 << 20
# 300 MiB in bf16, half of it in the layers
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 36_000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def test_buckets_in_memory_fill_a_shard():
    tensor = torch.arange(20.0).view(10, 2)
    buckets = plan_buckets([Span("a", tensor.dtype, (10, 2), slice(0, 10))], 24)
    target = ShardTarget(torch.zeros(10, 2, dtype=torch.float64))
    read_buckets(buckets, MemorySource({"a": tensor}), {"a": target}, Device("cpu"))
    assert torch.equal(target.shard, tensor.double())


def test_what_fails_amid_a_broadcast_fails_everywhere_and_the_next_works():
    first, second = run_on_ranks(f"{FAULTS}:break_streams", 2, timeout_seconds=60)
    assert first["source"] == "CheckpointError: the disk is gone"
    assert second["source"] == (
        "PeerError: loading weights failed on rank 0: CheckpointError: the disk is gone"
    )
    assert second["target"] == "CheckpointError: no room"
    assert first["target"].startswith("PeerError: loading weights failed on rank 1")
    assert first["nothing"] == second["nothing"] == ""


def test_a_rank_without_memory_stops_all_before_the_broadcast():
    first, second = run_on_ranks(f"{FAULTS}:fail_to_allocate", 2, timeout_seconds=60)
    assert second == "CheckpointError: no memory"
    assert first.startswith("PeerError: loading weights failed on rank 1")


def test_broken_folders_are_told_to_ranks_that_see_none(tmp_path):
    tensors = load_file(prepare_preset("tiny-llama", with_weights=True) / "model.safetensors")
    folders = {name: tmp_path / name for name in ("truncated", "incomplete", "mis-shaped", "empty")}
    for folder in folders.values():
        folder.mkdir()
    whole = folders["truncated"] / "model.safetensors"
    save_file(tensors, whole)
    whole.write_bytes(whole.read_bytes()[:-100])
    layer = [name for name in tensors if ".layers.0." in name]
    rest = {name: tensor for name, tensor in tensors.items() if name not in layer}
    save_file(rest, folders["incomplete"] / "model.safetensors")
    save_file(
        {**tensors, "model.norm.weight": torch.zeros(3)},
        folders["mis-shaped"] / "model.safetensors",
    )
    first, second = run_on_ranks(
        f"{FAULTS}:load_broken_folders",
        2,
        folders={name: str(folder) for name, folder in folders.items()},
        timeout_seconds=60,
    )
    wanted = {
        "truncated": "model.safetensors cannot be read: it is truncated",
        "incomplete": f"and {len(layer) - 5} more. The weights belong to another model",
        "mis-shaped": "of another shape: model.norm.weight (file [3], model [",
        "empty": "holds neither model.safetensors nor model.safetensors.index.json",
    }
    for kind, text in wanted.items():
        assert first[kind].startswith("CheckpointError"), kind
        assert text in first[kind]
        assert second[kind] == f"PeerError: loading weights failed on rank 0: {first[kind]}"


def test_a_load_takes_little_host_memory_besides_the_shards(tmp_path):
    """A shard and the buffers; far less than the model or one of its two files beside the shard."""
    bucket_bytes, slack = 8 * MIB, 24 * MIB
    results = run_on_ranks(
        f"{HOST}:measure_growth",
        2,
        folder=str(tmp_path),
        config=MODEL,
        bucket_bytes=bucket_bytes,
        timeout_seconds=60,
    )
    file_bytes = results[0]["read"]["model"] / 2
    for measured in results:
        for mode, found in measured.items():
            # three stages, and under gloo what it holds of a bucket to send or hear it
            limit = found["shards"] + 4 * bucket_bytes + slack
            assert limit < found["shards"] + file_bytes / 2
            assert found["growth"] < limit, (mode, json.dumps(found))
            assert found["growth"] > 0.9 * found["shards"], (mode, json.dumps(found))


@pytest.mark.gpu
@pytest.mark.parametrize("broadcast", [False, True], ids=["read", "broadcast"])
@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
def test_one_gpu_loads_the_files_values(broadcast, offload):
    (mismatches,) = run_on_ranks(
        f"{WEIGHTS}:load_from_files",
        1,
        device_type="cuda",
        timeout_seconds=60,
        path="tiny-qwen3",
        backend="fsdp:d1",
        offload=offload,
        broadcast=broadcast,
        kind="cuda",
    )
    assert mismatches == []


@pytest.mark.multi_gpu
@pytest.mark.parametrize("mesh", ["d2", "t2"])
@pytest.mark.parametrize("broadcast", [False, True], ids=["read", "broadcast"])
def test_two_gpus_load_the_files_values(mesh, broadcast):
    for mismatches in run_on_ranks(
        f"{WEIGHTS}:load_from_files",
        2,
        device_type="cuda",
        timeout_seconds=60,
        path="tiny-llama",
        backend=f"fsdp:{mesh}",
        offload=False,
        broadcast=broadcast,
        kind="cuda",
    ):
        assert mismatches == []


@pytest.mark.gpu
@pytest.mark.parametrize("broadcast", [False, True], ids=["read", "broadcast"])
def test_the_device_holds_shards_and_one_bucket(broadcast, tmp_path):
    ((peak, shards),) = run_on_ranks(
        f"{HOST}:measure_device_peak",
        1,
        device_type="cuda",
        timeout_seconds=60,
        folder=str(tmp_path),
        config=MODEL,
        bucket_bytes=16 * MIB,
        broadcast=broadcast,
    )
    assert peak <= shards + 16 * MIB + 2 * MIB  # the allocator's rounding
