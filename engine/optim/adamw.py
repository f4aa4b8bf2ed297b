"""AdamW over local shards: torch's fused kernel, one pass over memory, no temporary copy.

p <- p - lr * wd * p;  m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;
p <- p - lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps).
The kernel itself scales the gradient and does nothing when the verdict says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.adamw import adamw

from fsdpbench.engine.optim.sharded import STEP, ShardedOptimizer, StepGuard
from fsdpbench.engine.optim.shards import local_gradient, local_tensor


class AdamW(ShardedOptimizer):
    """AdamW with decoupled weight decay on every parameter, as `torch.optim.AdamW` has it."""

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def state_dtypes(self, param: torch.Tensor) -> dict[str, torch.dtype]:
        """Keep both moments in the parameter's dtype."""
        return {"exp_avg": param.dtype, "exp_avg_sq": param.dtype}

    def update_shards(
        self, group: dict[str, Any], params: list[torch.nn.Parameter], guard: StepGuard
    ) -> None:
        """Run the fused kernel over the shards of one device."""
        beta1, beta2 = group["betas"]
        adamw(
            [local_tensor(param) for param in params],
            [local_gradient(param) for param in params],
            self.local_states(params, "exp_avg"),
            self.local_states(params, "exp_avg_sq"),
            [],
            self.local_states(params, STEP),
            fused=True,
            grad_scale=guard.grad_scale,
            found_inf=guard.found_inf,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
