"""The course of the learning rate: linear warm-up from 0, then constant, linear or cosine decay."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fsdpbench.engine.config.optimizer import OptimizerConfig


def learning_rate_factor(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Return the share of the peak learning rate for a step, counted from 0.

    Warm-up takes floor(warmup_steps_proportion * total_steps) steps and starts at 0; the decay
    reaches min_lr_ratio at step `total_steps` and stays there.
    """
    warmup_steps = int(config.warmup_steps_proportion * total_steps)
    if step < warmup_steps:
        return step / warmup_steps
    if config.lr_scheduler_type == "constant":
        return 1.0
    decay_steps = max(1, total_steps - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / decay_steps)
    remaining = 1.0 - progress
    if config.lr_scheduler_type == "cosine":
        remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * remaining


def build_scheduler(optimizer: Optimizer, config: OptimizerConfig, total_steps: int) -> LambdaLR:
    """Build the scheduler; call its `step()` once per optimizer step."""
    return LambdaLR(optimizer, lambda step: learning_rate_factor(step, total_steps, config))
