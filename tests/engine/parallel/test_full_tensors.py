"""Gathered tensors equal the originals, for uneven shards and every mix of cuts."""

from __future__ import annotations

import pytest
import torch

from fsdpbench.engine.parallel.full_tensors import gather_full_tensor
from tests.distributed.pool import run_on_ranks

TENSORS = "tests.distributed.payloads.parallel_tensors"


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_gathers_what_was_sharded(tp):
    for mismatches in run_on_ranks(f"{TENSORS}:gather_sharded_tensors", 4, tp=tp):
        assert mismatches == []


def test_a_plain_tensor_is_returned():
    tensor = torch.randn(3, requires_grad=True)
    gathered = gather_full_tensor(tensor, torch.device("cpu"))
    assert torch.equal(gathered, tensor)
    assert not gathered.requires_grad
