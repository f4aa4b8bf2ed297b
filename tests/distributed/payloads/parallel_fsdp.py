"""FSDP2 units and dtypes on a toy model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdpbench.engine.config.fsdp import FSDPEngineConfig, FSDPWrapPolicy
from fsdpbench.engine.parallel.fsdp import apply_fsdp2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def is_gathered(layer: nn.Module) -> bool:
    return not isinstance(layer.a.weight, DTensor)


def list_units(
    rank: int, world_size: int, classes: list[str] | None, fields: dict[str, Any]
) -> dict[str, Any]:
    model = nn.Sequential(Layer(), Layer())
    policy = FSDPWrapPolicy(transformer_layer_cls_to_wrap=classes) if classes else None
    apply_fsdp2(
        model,
        init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",)),
        FSDPEngineConfig(wrap_policy=policy, **fields),
        device=torch.device("cpu"),
        layer_class="Layer",
        compute_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
    )
    output = model(torch.ones(1, 4))
    after_forward = [is_gathered(layer) for layer in model]
    output.float().sum().backward()
    weight = model[0].a.weight
    return {
        "gathered after forward": after_forward,
        "gradient sum": float(sum(p.grad.to_local().double().sum() for p in model.parameters())),
        "units": [name for name, m in model.named_modules() if isinstance(m, FSDPModule)],
        "dtypes": {
            "master": str(weight.dtype),
            "compute": str(output.dtype),
            "gradient": str(weight.grad.dtype),
        },
    }
