"""The learning rate's course, point by point."""

from __future__ import annotations

import math

import pytest
import torch

from fsdpbench.engine.config.optimizer import OptimizerConfig
from fsdpbench.engine.optim.schedule import build_scheduler, learning_rate_factor


def course(kind, warmup=0.0, floor=0.0, total=10, steps=11):
    config = OptimizerConfig(
        lr_scheduler_type=kind, warmup_steps_proportion=warmup, min_lr_ratio=floor
    )
    return [learning_rate_factor(step, total, config) for step in range(steps)]


def test_constant():
    assert course("constant") == [1.0] * 11


def test_warm_up_rises_from_zero_in_whole_steps():
    assert course("constant", warmup=0.4)[:6] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert course("constant", warmup=0.09) == [1.0] * 11  # less than a step


def test_linear_ends_at_the_floor_and_stays():
    factors = course("linear", floor=0.2, total=4, steps=7)
    assert factors == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_cosine_after_warm_up():
    factors = course("cosine", warmup=0.2, floor=0.1)
    assert factors[:3] == pytest.approx([0.0, 0.5, 1.0])
    for step in range(2, 11):
        shape = (1 + math.cos(math.pi * (step - 2) / 8)) / 2
        assert factors[step] == pytest.approx(0.1 + 0.9 * shape)
    assert factors[10] == pytest.approx(0.1)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("total", [0, 1])
def test_degenerate_runs(kind, total):
    assert all(0.0 <= factor <= 1.0 for factor in course(kind, warmup=1.0, total=total))


def test_scheduler_sets_the_optimizers_rate():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    config = OptimizerConfig(lr_scheduler_type="linear", warmup_steps_proportion=0.0)
    scheduler = build_scheduler(optimizer, config, 4)
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.5, 0.375, 0.25, 0.125, 0.0])
