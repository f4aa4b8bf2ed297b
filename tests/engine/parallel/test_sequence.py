"""Collectives under autograd: values and gradients against a single-process computation."""

from __future__ import annotations

import pytest

from tests.distributed.pool import run_on_ranks

SEQUENCES = "tests.distributed.payloads.parallel_sequences"


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("function", ["gather_sequence", "gather_sequence_replicated"])
def test_gathers_give_the_whole_and_their_own_backward(function, dim):
    for value_error, gradient_error in run_on_ranks(
        f"{SEQUENCES}:gather_and_differentiate", 3, function=function, dim=dim
    ):
        assert value_error == 0
        assert gradient_error < 1e-12


@pytest.mark.parametrize("dim", [0, 1])
def test_a_scattered_sum_is_the_inverse_of_the_gather(dim):
    for value_error, gradient_error in run_on_ranks(
        f"{SEQUENCES}:scatter_and_differentiate", 3, dim=dim
    ):
        assert value_error < 1e-12
        assert gradient_error == 0


def test_all_to_all_is_a_transpose_and_so_is_its_backward():
    for value_error, gradient_error in run_on_ranks(f"{SEQUENCES}:exchange", 3):
        assert value_error == 0
        assert gradient_error == 0
