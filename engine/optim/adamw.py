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

EXP_AVG, EXP_AVG_SQ = "exp_avg", "exp_avg_sq"


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
        return {EXP_AVG: param.dtype, EXP_AVG_SQ: param.dtype}

    def update_shards(
        self, group: dict[str, Any], params: list[torch.nn.Parameter], guard: StepGuard
    ) -> None:
        """Run the fused kernel over the shards of one device."""
        run_fused_adamw(
            group,
            [local_tensor(param) for param in params],
            [local_gradient(param) for param in params],
            {name: self.local_states(params, name) for name in (EXP_AVG, EXP_AVG_SQ, STEP)},
            guard,
        )


def run_fused_adamw(
    group: dict[str, Any],
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    states: dict[str, list[torch.Tensor]],
    guard: StepGuard,
) -> None:
    """Update plain tensors of one device in place, their moments and step counters with them."""
    beta1, beta2 = group["betas"]
    adamw(
        params,
        grads,
        states[EXP_AVG],
        states[EXP_AVG_SQ],
        [],
        states[STEP],
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
