"""Low-rank adapters in a meta-device model: y = W x + (alpha / rank) B (A x), with W frozen.

The one module that imports peft, whose layers, names and folder format are used so that adapters
are exchangeable with it. Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fsdpbench.engine.parallel.adapters import ADAPTER, find_adapted_layers
from fsdpbench.errors import ConfigError, Violation


@dataclass(frozen=True)
class AdapterSettings:
    """What all adapters of a model have in common."""

    rank: int
    alpha: int
    targets: tuple[str, ...]  # each ends the paths of linear layers


def inject_adapters(backbone: nn.Module, settings: AdapterSettings, dtype: torch.dtype) -> None:
    """Give the targets adapters of `dtype` without storage and freeze everything else, in place.

    On the meta device, before tensor parallelism. Module paths below a target change as peft has
    them: `q_proj.weight` becomes `q_proj.base_layer.weight`.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model  # slow, and only for those who adapt
    except ImportError as error:
        allowed, remedy = "needs the package peft", "run pip install 'peft>=0.18'"
        raise ConfigError([Violation("use_lora", "True", allowed, remedy)]) from error
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=list(settings.targets),
        lora_dropout=0.0,
        bias="none",
    )
    inject_adapter_in_model(config, backbone, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    backbone.requires_grad_(False)
    for adapted in find_adapted_layers(backbone).values():
        for module in (adapted.lora_a, adapted.lora_b):
            weight = module.get_parameter("weight")
            module.weight = nn.Parameter(torch.empty_like(weight, dtype=dtype))
