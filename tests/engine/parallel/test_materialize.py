"""Values of shards: the same for every mesh, from files and from rank 0; buffers and ties stay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdpbench.engine.device import Device
from fsdpbench.engine.parallel.materialize import allocate_shards
from tests.distributed.pool import run_on_ranks

WEIGHTS = "tests.distributed.payloads.parallel_weights"
MESHES = {"d1": 1, "t2": 2, "d3": 3, "c2t2": 4}


@pytest.mark.parametrize(
    ("path", "meshes"), [("tiny-qwen3", MESHES), ("tiny-llama", {"d1": 1, "d2": 2})]
)
def test_weights_from_scratch_are_bitwise_the_same_for_every_mesh(path, meshes):
    digests = set()
    for mesh, world_size in meshes.items():
        digests.update(
            run_on_ranks(f"{WEIGHTS}:digest", world_size, path=path, backend=f"fsdp:{mesh}")
        )
    assert len(digests) == 1


def test_another_seed_gives_other_weights():
    digests = [
        run_on_ranks(f"{WEIGHTS}:digest", 1, path="tiny-llama", backend="fsdp:d1", seed=seed)[0]
        for seed in (1, 2)
    ]
    assert digests[0] != digests[1]


@pytest.mark.parametrize(
    ("path", "mesh", "ranks", "offload"),
    [
        ("tiny-qwen3", "d1", 1, False),
        ("tiny-qwen3", "t2", 2, True),
        ("tiny-llama", "d2", 2, False),
        ("tiny-llama", "d3", 3, True),
        ("tiny-qwen3", "d2t2", 4, False),
    ],
)
@pytest.mark.parametrize("broadcast", [False, True], ids=["read", "broadcast"])
def test_loading_files_gives_the_files_values(path, mesh, ranks, offload, broadcast):
    for mismatches in run_on_ranks(
        f"{WEIGHTS}:load_from_files",
        ranks,
        path=path,
        backend=f"fsdp:{mesh}",
        offload=offload,
        broadcast=broadcast,
        timeout_seconds=60,
    ):
        assert mismatches == []


def test_rank_0_sends_its_state_dict_and_names_what_it_lacks():
    results = run_on_ranks(f"{WEIGHTS}:load_full_state_dict", 2, timeout_seconds=60)
    for kind, (mismatches, message) in zip(("CheckpointError", "PeerError"), results, strict=True):
        assert mismatches == []
        assert message.startswith(kind)
        assert "full_state_dict of rank 0: missing model.norm.weight." in message


def test_a_rank_holds_one_region_at_a_time():
    for region_elements, shard_elements, total in run_on_ranks(f"{WEIGHTS}:measure_regions", 4):
        assert region_elements == shard_elements
        assert shard_elements < total / 3


@pytest.mark.parametrize(("mesh", "broadcast"), [("d2", False), ("t2", True)])
def test_a_head_that_is_no_copy_of_its_tied_embedding_is_refused(mesh, broadcast, tmp_path):
    results = run_on_ranks(
        f"{WEIGHTS}:load_with_extras",
        2,
        backend=f"fsdp:{mesh}",
        folder=str(tmp_path),
        broadcast=broadcast,
        timeout_seconds=60,
    )
    readers = 1 if broadcast else 2
    for rank, said in enumerate(results):
        assert said["equal head"] == ""
        assert said["other tensor"] == ""
        assert "lm_head.weight differs from the weight that config.json ties" in said["other head"]
        unread = ["the model does not read model.rotary.inv_freq"]
        assert said["warnings"] == (unread if rank < readers else [])


def test_allocation_keeps_buffers_and_ties():
    with torch.device("meta"):
        model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "ab"})
    model["b"].weight = model["a"].weight
    model["a"].register_buffer("frequencies", torch.tensor([1.0, 2.0]), persistent=False)
    allocate_shards(model, Device("cpu"))
    assert model["b"].weight is model["a"].weight
    assert not model["a"].weight.is_meta
    assert model["a"].frequencies.tolist() == [1.0, 2.0]
