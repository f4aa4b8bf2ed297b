"""Whole weights leave a sharded model one at a time."""

from __future__ import annotations

from tests.distributed.pool import run_on_ranks

EXPORT = "tests.distributed.payloads.models_export"


def test_the_iterator_gives_whole_tensors_to_rank_0_alone():
    first, second = run_on_ranks(f"{EXPORT}:iterate", 2, backend="fsdp:t2", timeout_seconds=60)
    assert first["names"] == second["names"]
    assert "lm_head.weight" not in first["names"]
    assert first["embedding"] == ((512, 128), "torch.bfloat16", "cpu")
    assert second["embedding"] is None
