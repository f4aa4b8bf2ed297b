"""Regions equal what torch.chunk leaves on each rank, cut after cut."""

from __future__ import annotations

import pytest
import torch

from fsdpbench.engine.parallel.regions import (
    local_shard,
    plan_local_region,
    plan_region,
    shape_of,
)
from tests.distributed.pool import run_on_ranks

TENSORS = "tests.distributed.payloads.parallel_tensors"


def chunk(tensor: torch.Tensor, dim: int, parts: int, index: int) -> torch.Tensor:
    pieces = tensor.chunk(parts, dim=dim)
    return pieces[index] if index < len(pieces) else tensor.narrow(dim, 0, 0)


@pytest.mark.parametrize("shape", [(12, 6), (7, 4), (3, 8), (5,)])
@pytest.mark.parametrize("tp_dim", [0, 1])
def test_regions_are_chunks_of_chunks(shape, tp_dim):
    if tp_dim >= len(shape):
        return
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    for tp_rank in range(2):
        for fsdp_rank in range(4):
            region = plan_region(shape, [(tp_dim, 2, tp_rank), (0, 4, fsdp_rank)])
            wanted = chunk(chunk(full, tp_dim, 2, tp_rank), 0, 4, fsdp_rank)
            assert shape_of(region) == tuple(wanted.shape)
            assert torch.equal(full[region], wanted)


def test_a_plain_tensor_is_its_own_region():
    tensor = torch.nn.Parameter(torch.ones(3, 2))
    assert plan_local_region(tensor) == (slice(0, 3), slice(0, 2))
    shard = local_shard(tensor)
    assert not shard.requires_grad
    assert shard.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("tp", [1, 2])
def test_regions_of_fsdp_shards_are_what_fsdp_holds(tp):
    for mismatches in run_on_ranks(f"{TENSORS}:compare_regions_with_fsdp", 4, tp=tp):
        assert mismatches == []
