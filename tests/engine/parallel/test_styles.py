"""Our styles against the same module on one rank."""

from __future__ import annotations

import pytest

from tests.distributed.pool import run_on_ranks

TENSOR = "tests.distributed.payloads.parallel_tensor_parallel"


def test_replicated_parameters_sum_their_gradients():
    for output_error, gradient_error in run_on_ranks(f"{TENSOR}:replicate_and_sum_gradients", 2):
        assert output_error == 0
        assert gradient_error < 1e-3  # of values in the tens of thousands


@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_block_sees_the_whole_sequence(by_keyword):
    for output_error, gradient_error in run_on_ranks(
        f"{TENSOR}:gather_block_input", 2, by_keyword=by_keyword
    ):
        assert output_error < 1e-6
        assert gradient_error < 1e-6
