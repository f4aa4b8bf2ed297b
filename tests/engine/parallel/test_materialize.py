"""Values of shards: the same for every mesh, from files and from rank 0; buffers and ties stay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdpbench.engine.parallel.materialize import allocate_shards
from tests.distributed.pool import run_on_ranks

WEIGHTS = "tests.distributed.payloads.parallel_weights"
MESHES = {"d1": 1, "d2": 2, "t2": 2, "c2t2": 4}


@pytest.mark.parametrize("path", ["tiny-qwen3", "tiny-llama"])
def test_weights_from_scratch_are_bitwise_the_same_for_every_mesh(path):
    digests = set()
    for mesh, world_size in MESHES.items():
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


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("offload", [False, True])
def test_loading_files_gives_the_files_values(mesh, offload):
    for mismatches in run_on_ranks(
        f"{WEIGHTS}:load_from_files", MESHES[mesh], backend=f"fsdp:{mesh}", offload=offload
    ):
        assert mismatches == []


def test_rank_0_reads_for_all_and_names_what_it_lacks():
    for mismatches, message in run_on_ranks(f"{WEIGHTS}:load_full_state_dict", 2):
        assert mismatches == []
        assert "missing or of another shape: model.norm.weight" in message


def test_a_rank_holds_one_region_at_a_time():
    for region_elements, shard_elements, total in run_on_ranks(f"{WEIGHTS}:measure_regions", 4):
        assert region_elements == shard_elements
        assert shard_elements < total / 3


@pytest.mark.parametrize("mesh", ["d2", "t2"])
def test_a_head_that_is_no_copy_of_the_embedding_is_refused_where_the_config_ties(mesh, tmp_path):
    for said in run_on_ranks(
        f"{WEIGHTS}:load_with_extras", 2, backend=f"fsdp:{mesh}", folder=str(tmp_path)
    ):
        assert said["equal head"] == ""
        assert said["other tensor"] == ""
        assert "lm_head.weight differs from the weight that config.json ties" in said["other head"]
        assert said["warnings"] == ["the model does not read model.rotary.inv_freq"]


def test_allocation_keeps_buffers_and_ties():
    with torch.device("meta"):
        model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "ab"})
    model["b"].weight = model["a"].weight
    model["a"].register_buffer("frequencies", torch.tensor([1.0, 2.0]), persistent=False)
    allocate_shards(model, "cpu")
    assert model["b"].weight is model["a"].weight
    assert not model["a"].weight.is_meta
    assert model["a"].frequencies.tolist() == [1.0, 2.0]
