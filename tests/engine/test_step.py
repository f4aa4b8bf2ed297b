"""Functions of a step: alignment of values with tokens, planning over ranks, one host read."""

from __future__ import annotations

import ast
import inspect

import pytest
import torch

from fsdpbench.engine import step
from tests.distributed.pool import run_on_ranks
from tests.engine.test_fsdp_engine import make_config

PAYLOADS = "tests.distributed.payloads.engine_steps"


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_values_move_to_the_token_that_they_are_about(world_size):
    for gathered in run_on_ranks(f"{PAYLOADS}:align", world_size):
        # two sequences of 5 and 3: values 1..4 predict tokens 1..4, the last of each is 0
        assert gathered == [0, 1, 2, 3, 4, 0, 6, 7]


def test_every_rank_plans_as_many_microbatches_as_the_longest():
    counts = run_on_ranks(f"{PAYLOADS}:plan", 2)
    assert counts == [(4, 0), (4, 3)]


def test_the_step_reads_the_device_in_one_place():
    """No `.item()`, `.tolist()`, `.cpu()` or `float(tensor)` but where it is documented."""
    tree = ast.parse(inspect.getsource(step))
    readers = {
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in {"item", "tolist", "cpu", "numpy"}
    }
    assert readers == {"read_stats"}


def test_training_in_evaluation_mode_is_said_once():
    config = make_config("tiny-llama", "d1")
    (said,) = run_on_ranks(f"{PAYLOADS}:train_in_evaluation_mode", 1, config=config)
    assert said == [step.EVAL_MODE]


def test_read_stats_pairs_names_and_values():
    assert step.read_stats(["loss", "norm"], torch.tensor([1.5, 2.0])) == {"loss": 1.5, "norm": 2.0}
