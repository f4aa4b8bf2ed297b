"""Logprobs and gradients on every mesh equal those of a plain padded model, to fp32 rounding."""

from __future__ import annotations

import pytest

from tests.distributed.pool import run_on_ranks

POLICY = "tests.distributed.payloads.parallel_policy"
MESHES = ["d1", "d2", "t2", "c2", "d2t2", "d2c2", "c2t2", "d2c2t2"]
SIZES = {"d1": 1, "d2": 2, "t2": 2, "c2": 2, "d2t2": 4, "d2c2": 4, "c2t2": 4, "d2c2t2": 8}
LOGPROBS, GRADIENTS = 2e-6, 1e-5  # largest absolute, and largest relative to the tensor's largest


def check(path: str, mesh: str, **fields) -> None:
    errors = run_on_ranks(
        f"{POLICY}:compare_with_plain_model",
        SIZES[mesh],
        path=path,
        backend=f"fsdp:{mesh}",
        **fields,
    )
    for rank_errors in errors:
        assert rank_errors["logprobs"] < LOGPROBS, rank_errors
        assert rank_errors["gradients"] < GRADIENTS, rank_errors


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("path", ["tiny-qwen3", "tiny-llama"])
def test_equals_a_plain_model(path, mesh):
    check(path, mesh)
