"""From an `OptimizerConfig` to the optimizer it names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from fsdpbench.engine.config.optimizer import OptimizerConfig
from fsdpbench.engine.optim.adamw import AdamW
from fsdpbench.engine.optim.anyprecision import AnyPrecisionAdamW
from fsdpbench.engine.optim.sgd import SGD
from fsdpbench.engine.optim.sharded import ShardedOptimizer
from fsdpbench.errors import ConfigError, Violation, list_names


def build_optimizer(
    named_params: Iterable[tuple[str, torch.nn.Parameter]],
    config: OptimizerConfig,
    optimizer_dtype: str | None = None,
) -> ShardedOptimizer:
    """Build the optimizer over the parameters that require a gradient, each once.

    States follow the dtype of the parameters (the master weights), which must be `optimizer_dtype`
    ("float32", "bfloat16") when it is given; `adam_bf16` keeps bf16 moments whatever the master
    weights are. Weight decay acts on every parameter.
    """
    trainable = {param: name for name, param in named_params if param.requires_grad}
    if not trainable:
        raise ConfigError("optimizer: no parameter of the model requires a gradient")
    if optimizer_dtype is not None:
        check_master_dtype(trainable, optimizer_dtype)
    if config.type == "sgd":
        return SGD(list(trainable), lr=config.lr, weight_decay=config.weight_decay)
    kind = AdamW if config.type == "adam" else AnyPrecisionAdamW
    return kind(
        list(trainable),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )


def check_master_dtype(params: Mapping[torch.nn.Parameter, str], optimizer_dtype: str) -> None:
    """Refuse master weights of another dtype than the optimizer is to keep."""
    expected = f"torch.{optimizer_dtype}"
    wrong = [f"{name} is {p.dtype}" for p, name in params.items() if str(p.dtype) != expected]
    if wrong:
        allowed = f"all master weights must have this dtype, but {list_names(wrong)}"
        raise ConfigError([Violation("optimizer_dtype", optimizer_dtype, allowed)])
