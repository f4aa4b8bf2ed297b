"""The state of one process: live tensors, states before the first step, settings."""

from __future__ import annotations

import pytest
import torch

from fsdpbench.engine.checkpoint.state import DCPState, stage_on_host
from fsdpbench.engine.config.optimizer import OptimizerConfig
from fsdpbench.engine.optim.build import build_optimizer
from fsdpbench.engine.optim.schedule import build_scheduler


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(6, 4)
        self.inner = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(3))


def build(kind="adam", seed=0):
    torch.manual_seed(seed)
    model = Tied()
    settings = OptimizerConfig(type=kind, lr=0.1, warmup_steps_proportion=0.0)
    optimizer = build_optimizer(model.named_parameters(), settings)
    return DCPState(model, optimizer, build_scheduler(optimizer, settings, 10), version=3)


def step(state):
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizer.step()
    state.scheduler.step()


def test_tensors_are_live_and_tied_ones_appear_once():
    state = build()
    content = state.state_dict()
    assert sorted(content) == ["model", "optimizer", "progress", "rng"]
    assert sorted(content["model"]) == ["embedding.weight", "inner.bias", "inner.weight", "scale"]
    assert sorted(content["optimizer"]["inner.bias"]) == ["exp_avg", "exp_avg_sq", "step"]
    step(state)
    assert torch.equal(content["model"]["inner.bias"], state.model.inner.bias)
    assert content["optimizer"]["inner.bias"]["step"] == 1.0


@pytest.mark.parametrize("kind", ["adam", "adam_bf16", "sgd"])
def test_asking_before_the_first_step_changes_no_step(kind):
    asked, plain = build(kind), build(kind)
    asked.state_dict()
    for state in (asked, plain):
        step(state)
    for one, other in zip(asked.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["adam", "adam_bf16", "sgd"])
def test_another_state_takes_over_a_copy(kind):
    first, second = build(kind), build(kind, seed=1)
    first.optimizer.param_groups[0]["betas"] = (0.8, 0.9)
    second.optimizer.param_groups[0]["betas"] = (0.1, 0.2)
    step(first)
    copy = stage_on_host(first.state_dict())
    draw = torch.rand(1)
    second.version = 0
    second.load_state_dict(copy)
    assert torch.equal(torch.rand(1), draw)
    assert second.version == 3
    assert second.optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    for state in (first, second):
        step(state)
    assert first.scheduler.state_dict() == second.scheduler.state_dict()
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_parts_can_be_left_out():
    state = build()
    state.with_model = state.with_rng = False
    assert sorted(state.state_dict()) == ["optimizer", "progress"]
    assert sorted(DCPState(state.model, with_rng=False).state_dict()) == ["model", "progress"]


def test_a_staged_copy_does_not_change():
    state = build()
    staged = stage_on_host(state.state_dict())
    before = staged["model"]["inner.bias"].clone()
    step(state)
    assert torch.equal(staged["model"]["inner.bias"], before)
    assert staged["progress"] != state.state_dict()["progress"]
