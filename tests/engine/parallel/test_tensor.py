"""Tied weights stay one parameter, and a plan with a hole is refused."""

from __future__ import annotations

import torch
from torch import nn

from fsdpbench.engine.parallel.tensor import (
    apply_non_moe_tp,
    apply_tensor_parallel,
    build_styles,
    find_tied_parameters,
    tie_parameters,
)
from fsdpbench.engine.parallel.tensor_plans import TensorStyle
from tests.distributed.pool import run_on_ranks

TENSOR = "tests.distributed.payloads.parallel_tensor_parallel"


def test_guide_name():
    assert apply_non_moe_tp is apply_tensor_parallel


def test_every_style_has_a_translation():
    plan = {style.name: style for style in TensorStyle}
    assert build_styles(plan).keys() == plan.keys()


def test_ties_are_found_and_restored():
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"})
    model["c"].weight = model["a"].weight
    assert find_tied_parameters(model) == [["a.weight", "c.weight"]]
    model["a"].weight = nn.Parameter(torch.zeros(2, 2))
    tie_parameters(model, [["a.weight", "c.weight"]])
    assert model["c"].weight is model["a"].weight
    assert model["b"].weight is not model["a"].weight


def test_embedding_and_head_are_cut_over_the_vocabulary_and_stay_tied():
    for found in run_on_ranks(f"{TENSOR}:describe_tied_model", 2):
        assert found["tied"]
        assert found["placements"] == {
            "model.embed_tokens.weight": "S(0)",
            "model.norm.weight": "R",
            "model.layers.0.self_attn.q_proj.weight": "S(0)",
            "model.layers.0.self_attn.o_proj.weight": "S(1)",
            "model.layers.0.self_attn.q_norm.weight": "R",
            "model.layers.0.mlp.down_proj.weight": "S(1)",
        }


def test_a_parameter_that_the_plan_forgets_is_named():
    for message in run_on_ranks(f"{TENSOR}:apply_plan_with_a_hole", 2):
        assert "leaves out model.layers.0.self_attn.q_norm.weight" in message
