"""AdamW with low-precision moments and Kahan summation: small updates survive in bf16 weights.

Each step computes in float32, u = c - lr * wd * p - lr * m_hat / (sqrt(v_hat) + eps), and writes
p' = round(p + u), c' = round(u - (p' - p)): what rounding took is carried to the next step. One
Triton kernel a shard does it in a pass; without Triton work runs in chunks of bounded size, so the
float32 temporaries never amount to a copy of the shards.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable
from typing import Any

import torch

from fsdpbench.engine.optim.multi_tensor import Piece, plan_chunks
from fsdpbench.engine.optim.sharded import STEP, ShardedOptimizer, StepGuard
from fsdpbench.engine.optim.shards import flat_view, local_gradient, local_tensor

CHUNK_ELEMENTS = 1 << 22  # with all temporaries some 160 MiB in flight
COMPENSATION = "compensation"


class AnyPrecisionAdamW(ShardedOptimizer):
    """AdamW whose moments have dtypes of their own.

    Parameters narrower than float32 get a Kahan compensation unless `use_kahan_summation` is off;
    wider ones need none. A bf16 second moment follows changes of the gradient's size coarsely: it
    moves only when a step changes it by more than half a unit in its last place (about 0.3 %).
    `fused` None: one kernel a shard where Triton is installed, chunks elsewhere.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        use_kahan_summation: bool = True,
        momentum_dtype: torch.dtype = torch.bfloat16,
        variance_dtype: torch.dtype = torch.bfloat16,
        compensation_dtype: torch.dtype = torch.bfloat16,
        chunk_elements: int = CHUNK_ELEMENTS,
        fused: bool | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.use_kahan_summation = use_kahan_summation
        self.momentum_dtype = momentum_dtype
        self.variance_dtype = variance_dtype
        self.compensation_dtype = compensation_dtype
        self.chunk_elements = chunk_elements
        self.fused = fused
        super().__init__(params, defaults)

    def state_dtypes(self, param: torch.Tensor) -> dict[str, torch.dtype]:
        """Keep both moments, and the compensation of a narrow parameter."""
        dtypes = {"exp_avg": self.momentum_dtype, "exp_avg_sq": self.variance_dtype}
        if self.use_kahan_summation and param.dtype.itemsize < torch.float32.itemsize:
            dtypes[COMPENSATION] = self.compensation_dtype
        return dtypes

    @torch.no_grad()
    def forget_rounding(self) -> None:
        """Zero what rounding took from the parameters: after their values were replaced."""
        for state in self.state.values():
            if COMPENSATION in state:
                local_tensor(state[COMPENSATION]).zero_()

    def update_shards(
        self, group: dict[str, Any], params: list[torch.nn.Parameter], guard: StepGuard
    ) -> None:
        """Update the shards of one device, dtype by dtype, chunk by chunk."""
        for dtype in dict.fromkeys(param.dtype for param in params):
            self._update_same_dtype(group, [p for p in params if p.dtype == dtype], guard)

    def _update_same_dtype(
        self, group: dict[str, Any], params: list[torch.nn.Parameter], guard: StepGuard
    ) -> None:
        steps = self.local_states(params, STEP)
        torch._foreach_add_(steps, 1.0)
        if guard.found_inf is not None:
            torch._foreach_sub_(steps, [guard.found_inf] * len(steps))
        sizes, floors = _step_sizes(torch.stack(steps), group)
        flat = {"param": [flat_view(local_tensor(param)) for param in params]}
        flat["grad"] = [flat_view(local_gradient(param)) for param in params]
        for name in self.state_dtypes(params[0]):
            flat[name] = [flat_view(state) for state in self.local_states(params, name)]
        if _has_kernel(params[0]) if self.fused is None else self.fused:
            _run_kernel(flat, sizes, floors, guard, group)
        else:
            self._run_chunks(flat, sizes, floors, guard, group)

    def _run_chunks(
        self,
        flat: dict[str, list[torch.Tensor]],
        sizes: torch.Tensor,
        floors: torch.Tensor,
        guard: StepGuard,
        group: dict[str, Any],
    ) -> None:
        skip = None if guard.found_inf is None else guard.found_inf.bool()
        lengths = [shard.numel() for shard in flat["param"]]
        for chunk in plan_chunks(lengths, self.chunk_elements):
            views = {name: _views(tensors, chunk) for name, tensors in flat.items()}
            old = {name: _join(tensors) for name, tensors in views.items()}
            size, floor = _spread(sizes, chunk), _spread(floors, chunk)
            new = _step_chunk(old, size, floor, guard.grad_scale, group)
            for name, value in new.items():
                _write(views[name], old[name], value, skip)


def _has_kernel(param: torch.Tensor) -> bool:
    on_gpu = local_tensor(param).device.type == "cuda" and param.dtype != torch.float64
    return on_gpu and importlib.util.find_spec("triton") is not None


def _run_kernel(
    flat: dict[str, list[torch.Tensor]],
    sizes: torch.Tensor,
    floors: torch.Tensor,
    guard: StepGuard,
    group: dict[str, Any],
) -> None:
    from fsdpbench.engine.optim.anyprecision_kernel import update_shard  # imports triton

    for index in range(len(flat["param"])):
        shard = {name: tensors[index] for name, tensors in flat.items()}
        update_shard(shard, index, sizes, floors, guard.grad_scale, guard.found_inf, group)


def _step_chunk(
    old: dict[str, torch.Tensor],
    size: torch.Tensor,
    floor: torch.Tensor,
    grad_scale: torch.Tensor | None,
    group: dict[str, Any],
) -> dict[str, torch.Tensor]:
    """Compute one chunk's new values in float32 (or the parameter's wider type)."""
    beta1, beta2 = group["betas"]
    wide = torch.promote_types(old["param"].dtype, torch.float32)
    param = old["param"].to(wide)
    grad = old.pop("grad").to(wide)
    if grad_scale is not None:
        grad = grad / grad_scale
    exp_avg = old["exp_avg"].to(wide).lerp(grad, 1 - beta1)
    exp_avg_sq = old["exp_avg_sq"].to(wide).mul(beta2).addcmul_(grad, grad, value=1 - beta2)
    del grad
    update = exp_avg_sq.sqrt().add_(floor).reciprocal_().mul_(exp_avg).mul_(size)
    update.add_(param, alpha=-group["lr"] * group["weight_decay"])
    new = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if COMPENSATION not in old:
        return new | {"param": update.add_(param)}
    update.add_(old[COMPENSATION])
    rounded = (param + update).to(old["param"].dtype)
    new["param"] = rounded
    new[COMPENSATION] = update.sub_(rounded.to(wide).sub_(param))
    return new


def _step_sizes(steps: torch.Tensor, group: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return per parameter -lr * sqrt(1 - b2^t) / (1 - b1^t) and eps * sqrt(1 - b2^t).

    Bias corrections are folded into these two; expm1 keeps the digits that 1 - b^t loses.
    """
    beta1, beta2 = group["betas"]
    correction1 = -torch.expm1(steps * math.log(beta1)) if beta1 else torch.ones_like(steps)
    correction2 = -torch.expm1(steps * math.log(beta2)) if beta2 else torch.ones_like(steps)
    root = correction2.sqrt()
    return -group["lr"] * root / correction1, group["eps"] * root


def _views(tensors: list[torch.Tensor], chunk: list[Piece]) -> list[torch.Tensor]:
    return [tensors[piece.index][piece.start : piece.start + piece.length] for piece in chunk]


def _join(views: list[torch.Tensor]) -> torch.Tensor:
    return views[0] if len(views) == 1 else torch.cat(views)


def _spread(values: torch.Tensor, chunk: list[Piece]) -> torch.Tensor:
    """Return each piece's value, broadcast over a chunk of one piece, repeated over many."""
    if len(chunk) == 1:
        return values[chunk[0].index]
    return torch.cat([values[piece.index].expand(piece.length) for piece in chunk])


def _write(
    views: list[torch.Tensor], old: torch.Tensor, new: torch.Tensor, skip: torch.Tensor | None
) -> None:
    """Round and write a chunk's values back; under a skip the very bits that were there."""
    rounded = new.to(old.dtype)
    if skip is not None:
        rounded = torch.where(skip, old, rounded)
    lengths = [view.numel() for view in views]
    torch._foreach_copy_(views, list(torch.split(rounded, lengths)))
