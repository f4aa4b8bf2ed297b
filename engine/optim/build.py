"""From an `OptimizerConfig` to the optimizer it names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from fsdpbench.engine.config.optimizer import OptimizerConfig
from fsdpbench.engine.device import Device
from fsdpbench.engine.optim.adamw import AdamW
from fsdpbench.engine.optim.anyprecision import AnyPrecisionAdamW
from fsdpbench.engine.optim.sgd import SGD
from fsdpbench.engine.optim.sharded import ShardedOptimizer
from fsdpbench.engine.optim.streaming import StreamedAdamW
from fsdpbench.errors import ConfigError, Violation, list_names


def build_optimizer(
    named_params: Iterable[tuple[str, torch.nn.Parameter]],
    config: OptimizerConfig,
    optimizer_dtype: str | None = None,
    *,
    blocks: Sequence[Collection[torch.nn.Parameter]] | None = None,
    device: Device | None = None,
    prefetch_layers: int = 1,
) -> ShardedOptimizer:
    """Build the optimizer over the parameters that require a gradient, each once.

    States follow the dtype of the parameters (the master weights), which must be `optimizer_dtype`
    ("float32", "bfloat16") when it is given; `adam_bf16` keeps bf16 moments whatever the master
    weights are. Weight decay acts on every parameter.

    `blocks` (see `stream_plan.find_blocks`) asks for the per-layer step on `device`: type adam,
    states in host memory, `prefetch_layers` blocks fetched ahead.
    """
    trainable = {param: name for name, param in named_params if param.requires_grad}
    if not trainable:
        raise ConfigError("optimizer: no parameter of the model requires a gradient")
    if optimizer_dtype is not None:
        check_master_dtype(trainable, optimizer_dtype)
    if blocks is not None:
        return _build_streamed(list(trainable), config, blocks, device, prefetch_layers)
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


def _build_streamed(
    params: list[torch.nn.Parameter],
    config: OptimizerConfig,
    blocks: Sequence[Collection[torch.nn.Parameter]],
    device: Device | None,
    prefetch_layers: int,
) -> StreamedAdamW:
    if config.type != "adam":
        allowed = "the per-layer optimizer step is available for adam only"
        remedy = "set optimizer.type to adam, or fsdp.per_layer_optim_step to false"
        raise ConfigError([Violation("optimizer.type", config.type, allowed, remedy)])
    assert device is not None  # comes with the blocks
    return StreamedAdamW(
        params,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        device=device,
        blocks=blocks,
        prefetch_layers=prefetch_layers,
    )


def check_master_dtype(params: Mapping[torch.nn.Parameter, str], optimizer_dtype: str) -> None:
    """Refuse master weights of another dtype than the optimizer is to keep."""
    expected = f"torch.{optimizer_dtype}"
    wrong = [f"{name} is {p.dtype}" for p, name in params.items() if str(p.dtype) != expected]
    if wrong:
        allowed = f"all master weights must have this dtype, but {list_names(wrong)}"
        raise ConfigError([Violation("optimizer_dtype", optimizer_dtype, allowed)])
