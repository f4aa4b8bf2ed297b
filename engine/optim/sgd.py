"""Plain SGD over local shards with torch's fused kernel: p <- p - lr * (g + wd * p). No states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.sgd import sgd

from fsdpbench.engine.optim.sharded import ShardedOptimizer, StepGuard
from fsdpbench.engine.optim.shards import local_gradient, local_tensor


class SGD(ShardedOptimizer):
    """SGD without momentum; weight decay acts as decoupled decay does, there being no moments."""

    def __init__(
        self, params: Iterable[torch.nn.Parameter], lr: float = 1e-3, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def state_dtypes(self, param: torch.Tensor) -> dict[str, torch.dtype]:
        """Keep nothing."""
        return {}

    def update_shards(
        self, group: dict[str, Any], params: list[torch.nn.Parameter], guard: StepGuard
    ) -> None:
        """Run the fused kernel over the shards of one device."""
        sgd(
            [local_tensor(param) for param in params],
            [local_gradient(param) for param in params],
            [None] * len(params),
            fused=True,
            grad_scale=guard.grad_scale,
            found_inf=guard.found_inf,
            weight_decay=group["weight_decay"],
            momentum=0.0,
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
