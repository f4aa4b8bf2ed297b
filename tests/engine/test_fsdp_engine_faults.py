"""What one call leaves behind for the next, and what the other ranks hear of one rank's fault."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from fsdpbench.engine.config.train import FinetuneSpec, TrainEngineConfig
from fsdpbench.engine.fsdp_engine import FSDPEngine
from tests.distributed.pool import run_on_ranks
from tests.engine.test_fsdp_engine import TOLERANCE, folder_of, make_config

PAYLOADS = "tests.distributed.payloads.engine_faults"


@pytest.mark.parametrize(("mesh", "ranks"), [("d1", 1), ("t2", 2)])
def test_evaluation_amid_training_changes_nothing(mesh, ranks):
    config = make_config("tiny-qwen3", mesh)
    alone, between = (
        run_on_ranks(f"{PAYLOADS}:train_around_evaluation", ranks, config=config, evaluate=evaluate)
        for evaluate in (False, True)
    )
    for expected, result in zip(alone, between, strict=True):
        assert result["num_leftovers"] == 0  # a step drops its gradients
        assert result["norm"] == expected["norm"]
        assert result["after"] == expected["after"]
        assert result["after"] < min(result["losses"])  # seen with the weights after the step
        assert len(set(result["losses"])) == 1
    for name, value in alone[0]["weights"].items():
        np.testing.assert_array_equal(between[0]["weights"][name], value, err_msg=name)


def test_evaluation_sees_loaded_weights(tmp_path):
    config = make_config("tiny-llama", "d2")
    for first, trained, loaded in run_on_ranks(
        f"{PAYLOADS}:evaluate_loaded_weights", 2, config=config, folder=str(tmp_path / "saved")
    ):
        assert trained < first
        assert loaded == first


def test_a_destroyed_engine_leaves_no_memory_and_makes_room_for_another_mesh():
    first, second = make_config("tiny-llama", "d2"), make_config("tiny-qwen3", "t2")
    fresh = run_on_ranks(f"{PAYLOADS}:rebuild", 2, first=second, second=second)
    for result, expected in zip(
        run_on_ranks(f"{PAYLOADS}:rebuild", 2, first=first, second=second), fresh, strict=True
    ):
        assert result["alive"] == 0
        assert result["stats"] == expected["stats"]


@pytest.mark.parametrize("mesh", ["d2", "t2", "c2"])
def test_a_batch_that_one_rank_refuses_stops_all(mesh):
    first, last = run_on_ranks(
        f"{PAYLOADS}:refuse_batches", 2, config=make_config("tiny-qwen3", mesh)
    )
    assert "right-padded" in last["ragged"][1]
    assert "vocabulary" in last["foreign"][1]
    for name in ("ragged", "foreign"):
        assert last[name][0] == "ConfigError"
        assert first[name][0] == "PeerError"
        assert first[name][1].startswith("reading the batch failed on rank 1: ConfigError: batch.")
    for result in (first, last):
        if mesh == "d2":  # each rank has a batch of its own
            assert result["shifted"] == ("", "")
        else:
            assert "differs between the ranks of data-parallel index 0" in result["shifted"][1]
        assert np.isfinite(result["loss"])


def test_bookkeeping_keeps_fp32_beside_bf16_compute():
    config = make_config("tiny-qwen3", "d2t2", dtype="bfloat16")
    for result in run_on_ranks(f"{PAYLOADS}:weigh_by_thirds", 4, config=config):
        assert result["floating_inputs"] == []  # FSDP2 would round them
        stats = result["stats"]
        assert stats["weight"] == pytest.approx(1.0, rel=1e-6)  # bf16 thirds: 1.001
        assert result["logprobs"] == "torch.float32"
        assert stats["loss"] != torch.tensor(stats["loss"]).bfloat16().item()


@pytest.mark.parametrize("kind", ["nowhere", "truncated"])
def test_a_rank_that_cannot_initialize_stops_all(kind, tmp_path):
    folder = tmp_path / "model"
    if kind == "truncated":
        shutil.copytree(folder_of("tiny-llama"), folder)
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
    (first,), (last,) = run_on_ranks(
        f"{PAYLOADS}:fail_to_initialize",
        2,
        config=make_config("tiny-llama", "d2"),
        path=str(folder),
    )
    assert last[0] == {"nowhere": "TopologyError", "truncated": "CheckpointError"}[kind]
    assert first[0] == "PeerError"
    assert last[1] in first[1]


def test_a_full_disk_stops_all_and_keeps_the_old_folder(tmp_path):
    first, second = run_on_ranks(
        f"{PAYLOADS}:fail_to_save",
        2,
        config=make_config("tiny-llama", "t2"),
        folder=str(tmp_path / "saved"),
    )
    assert first["said"][0] == "CheckpointError"
    assert "No space left" in first["said"][1]
    assert second["said"][0] == "PeerError"
    assert first["kept"]


def test_other_degrees_than_those_in_force_are_refused():
    for kind, text in run_on_ranks(
        f"{PAYLOADS}:ask_for_other_degrees", 2, config=make_config("tiny-llama", "d2")
    ):
        assert kind == "TopologyError"
        assert "fsdp:d1c1t2: the engine has its groups already, for fsdp:d2c1t1" in text


@pytest.mark.slow
def test_dropout_is_seeded_and_differs_between_ranks(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(folder_of("tiny-llama"), folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "attention_dropout": 0.3}))
    config = make_config(str(folder), "t2", attn_impl="eager")
    results = run_on_ranks(f"{PAYLOADS}:seed_dropout", 2, config=config)
    assert len({seed for seed, _ in results}) == 2
    assert len({loss for _, losses in results for loss in losses}) == 1
    another = run_on_ranks(f"{PAYLOADS}:seed_dropout", 2, config={**config, "seed": 2})
    without = run_on_ranks(
        f"{PAYLOADS}:seed_dropout", 2, config={**config, "disable_dropout": True}
    )
    assert len({found[0][1][0] for found in (results, another, without)}) == 3


@pytest.mark.parametrize("attn_impl", ["auto", "eager"])
def test_float16_serves_inference(attn_impl):
    exact, half = (
        run_on_ranks(
            f"{PAYLOADS}:forward_in_half_precision",
            1,
            config=make_config(
                "tiny-llama", "d1", dtype=dtype, optimizer=None, attn_impl=attn_impl
            ),
        )[0]
        for dtype in ("float32", "float16")
    )
    assert half[0] == torch.float32
    assert 0 < np.abs(half[1] - exact[1]).max() < 0.02


@pytest.mark.parametrize("changes", [{}, {"pad_to_maximum": True}], ids=["plain", "padded"])
def test_a_rank_without_rows_keeps_step(changes):
    spec = {"n_mbs": 1, "max_tokens_per_mb": 64, "n_mbs_divisor": 2}
    alone = run_on_ranks(
        "tests.distributed.payloads.engine_checks:train_uneven",
        1,
        config=make_config("tiny-qwen3", "d1"),
        cut=12,
    )[0]["stats"]
    config = make_config("tiny-qwen3", "d2", mb_spec=spec, **changes)
    results = run_on_ranks(f"{PAYLOADS}:train_without_rows", 2, config=config)
    for result in results:
        for name in ("loss", "grad_norm"):
            assert result["stats"][name] == pytest.approx(alone[name], rel=TOLERANCE)
        assert result["stats"]["num_micro_batches"] % 2 == 0
    assert [result["shape"] for result in results] == [(12, 31), (0, 31)]


LONE = """
from fsdpbench.engine.algorithms.sft import FSDPLMEngine
from fsdpbench.engine.config.train import TrainEngineConfig
import torch.distributed as dist
engines = [FSDPLMEngine(TrainEngineConfig(path="tiny-llama")) for _ in range(2)]
for engine in engines:
    engine.create_process_group()
engines[0].destroy()
engines[0].destroy()
dist.barrier(group=engines[1].cpu_group)
engines[1].destroy()
print(dist.is_initialized())
"""


def test_the_default_group_lives_as_long_as_an_engine_uses_it():
    done = subprocess.run([sys.executable, "-c", LONE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False"]


def test_fields_without_effect_are_named_once(caplog, monkeypatch):
    monkeypatch.setattr("fsdpbench.log._warned", set())
    monkeypatch.setattr(logging.getLogger("fsdpbench"), "propagate", True)
    config = TrainEngineConfig(path="tiny-llama", init_from_scratch=True, lora_rank=4)
    for _ in range(2):
        engine = FSDPEngine(config)
        engine.initialize(
            ft_spec=FinetuneSpec(total_train_epochs=1, dataset_size=1, train_batch_size=1)
        )
        engine.destroy()
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == ["lora_rank: has no effect: use_lora is false"]
