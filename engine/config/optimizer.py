"""What updates the weights and how the learning rate moves; `engine.optim` does it."""

from __future__ import annotations

from typing import Literal

from fsdpbench.engine.config.strict import BelowOne, Fraction, NonNegative, Positive, StrictModel


class OptimizerConfig(StrictModel):
    """Optimizer, learning-rate schedule and gradient clipping."""

    type: Literal["adam", "adam_bf16", "sgd"] = "adam"
    """The rule of the step: AdamW, AdamW with bf16 states and Kahan summation, or plain SGD."""
    lr: NonNegative = 1e-3
    """Peak learning rate."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay, multiplied by the learning rate."""
    beta1: BelowOne = 0.9
    """Decay of the first moment; Adam only."""
    beta2: BelowOne = 0.999
    """Decay of the second moment; Adam only."""
    eps: Positive = 1e-8
    """Added to the root of the second moment; Adam only."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up, down to min_lr_ratio unless constant."""
    warmup_steps_proportion: Fraction = 0.001
    """Share of all steps over which the rate rises linearly; 0 starts at the peak."""
    min_lr_ratio: Fraction = 0.0
    """Last learning rate as a share of the peak; linear and cosine only."""
    gradient_clipping: Positive = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it."""
