"""Tokens for heads and back, with key-value heads replicated where they are fewer than ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fsdpbench.engine.parallel.ulysses import slice_row
from fsdpbench.errors import TopologyError
from tests.distributed.pool import run_on_ranks

SEQUENCES = "tests.distributed.payloads.parallel_sequences"


@pytest.mark.parametrize(("query_heads", "key_heads"), [(4, 4), (8, 2), (4, 1), (12, 4)])
def test_heads_scatter_and_gather(query_heads, key_heads):
    for result in run_on_ranks(
        f"{SEQUENCES}:scatter_and_gather_heads", 4, query_heads=query_heads, key_heads=key_heads
    ):
        assert result["query_error"] == 0
        assert result["key_error"] == 0
        assert result["round_trip_error"] == 0
        assert result["key_gradient_error"] < 1e-12


def test_a_row_is_cut_in_rank_order_and_gathered_back():
    rows = run_on_ranks(f"{SEQUENCES}:slice_and_gather_row", 2)
    assert [sliced for sliced, _ in rows] == [[0, 1, 2], [3, 4, 5]]
    assert all(gathered == [0, 1, 2, 3, 4, 5] for _, gathered in rows)


def test_a_row_that_does_not_divide_is_refused():
    store = dist.HashStore()
    group = dist.ProcessGroup(store, 0, 2)  # only its size is asked
    with pytest.raises(TopologyError, match=r"5 tokens.*context_parallel_size=2"):
        slice_row(torch.arange(5), group)
