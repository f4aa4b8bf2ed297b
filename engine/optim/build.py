"""From an `OptimizerConfig` to the optimizer it names."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fsdpbench.engine.config.optimizer import OptimizerConfig
from fsdpbench.engine.optim.adamw import AdamW
from fsdpbench.engine.optim.anyprecision import AnyPrecisionAdamW
from fsdpbench.engine.optim.sgd import SGD
from fsdpbench.engine.optim.sharded import ShardedOptimizer
from fsdpbench.errors import ConfigError, Violation


def build_optimizer(
    params: Iterable[torch.nn.Parameter],
    config: OptimizerConfig,
    optimizer_dtype: torch.dtype | None = None,
) -> ShardedOptimizer:
    """Build the optimizer over the parameters that require a gradient, each once.

    States follow the dtype of the parameters (the master weights), which must be `optimizer_dtype`
    when it is given; `adam_bf16` keeps bf16 moments whatever the master weights are. Weight decay
    acts on every parameter.
    """
    trainable = [param for param in dict.fromkeys(params) if param.requires_grad]
    if not trainable:
        raise ConfigError("optimizer: no parameter requires a gradient")
    found = {param.dtype for param in trainable}
    if optimizer_dtype is not None and found != {optimizer_dtype}:
        names = ", ".join(sorted(str(dtype) for dtype in found))
        allowed = f"parameters are of {names}; the master weights must have the optimizer's dtype"
        raise ConfigError([Violation("optimizer_dtype", str(optimizer_dtype), allowed)])
    if config.type == "sgd":
        return SGD(trainable, lr=config.lr, weight_decay=config.weight_decay)
    kind = AdamW if config.type == "adam" else AnyPrecisionAdamW
    return kind(
        trainable,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )
