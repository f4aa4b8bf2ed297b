"""The global gradient norm under any mix of placements, and the verdict over a step.

norm^2 = sum over parameters of the squares of the local shard, summed over the axes on which that
parameter is cut; axes with copies count once. The inf-norm is the largest element over shards and
axes. One all-reduce per axis, whatever the mix. The host reads nothing: coefficient and verdict
stay on the device and are applied inside the optimizer's step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdpbench.engine.optim.multi_tensor import multi_tensor_norm, multi_tensor_scale
from fsdpbench.engine.optim.shards import (
    local_tensor,
    reduce_pending_gradients,
    sharding_groups,
)
from fsdpbench.errors import ConfigError, Violation

NORM_FLOOR = 1e-6  # added to the norm before dividing, as torch.nn.utils.clip_grad_norm_ does


@dataclass(frozen=True)
class ClipVerdict:
    """What a step is to do with its gradients; every field is a 0-D tensor on the device."""

    norm: torch.Tensor
    scale: torch.Tensor | None  # factor of the gradients, at most 1; None: no scaling
    found_inf: torch.Tensor  # 1.0: not finite, the step must change nothing; else 0.0

    @property
    def grad_scale(self) -> torch.Tensor | None:
        """What an optimizer divides gradients by, as torch's fused optimizers name it."""
        return None if self.scale is None else self.scale.reciprocal()


@torch.no_grad()
def gradient_norm(
    params: Iterable[torch.nn.Parameter],
    norm_type: float = 2.0,
    compute_device: torch.device | None = None,
) -> torch.Tensor:
    """Return the norm of the whole gradient, 0-D, float32 or wider, equal on all ranks.

    `params` must be the same list, in the same order, on all ranks; a parameter without a gradient
    counts as zero. `norm_type` is 2.0 or inf; the inf-norm of a gradient with NaNs is inf. The
    result lies on `compute_device`, which also does the arithmetic of shards on the host, through
    bounded buffers; without one it lies with the shards, on the CPU when they are offloaded.
    Collective over: every axis on which a parameter is cut, and those of pending gradients.
    """
    check_norm_type(norm_type)
    params = list(dict.fromkeys(params))
    reduce_pending_gradients(params)
    groups: dict[str, dist.ProcessGroup] = {}
    grads: dict[tuple[str, ...], list[torch.Tensor]] = {}
    device = compute_device or torch.device("cpu")
    for param in params:
        cut_over = {str(group.group_name): group for group in sharding_groups(param)}
        groups |= cut_over
        members = grads.setdefault(tuple(cut_over), [])
        shard = local_tensor(param)
        if device.type == "cpu" and compute_device is None:
            device = shard.device
        if param.grad is not None:
            members.append(local_tensor(param.grad))
    norms = {
        key: multi_tensor_norm(members, norm_type, compute_device).to(device)
        for key, members in grads.items()
    }
    if norm_type == math.inf:
        return _largest_over_groups(norms, groups, device)
    squares = {key: norm.square() for key, norm in norms.items()}
    return _sum_over_groups(squares, groups, device).sqrt()


def check_norm_type(norm_type: float) -> None:
    """Refuse a norm that is not computed here."""
    if norm_type not in (2.0, math.inf):
        raise ConfigError([Violation("norm_type", repr(norm_type), "must be 2.0 or inf")])


def _largest_over_groups(
    norms: dict[tuple[str, ...], torch.Tensor],
    groups: dict[str, dist.ProcessGroup],
    device: torch.device,
) -> torch.Tensor:
    """Return the largest norm; taking it over copies, too, does no harm."""
    if not norms:
        return torch.zeros((), device=device)
    # the collectives' maximum may drop NaN
    largest = torch.nan_to_num(torch.stack(list(norms.values())), nan=math.inf, posinf=math.inf)
    largest = largest.max()
    for group in groups.values():
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


def _sum_over_groups(
    squares: dict[tuple[str, ...], torch.Tensor],
    groups: dict[str, dist.ProcessGroup],
    device: torch.device,
) -> torch.Tensor:
    """Finish each sum over its own groups, one all-reduce per group for all sums that need it."""
    for name, group in groups.items():
        keys = [key for key in squares if name in key]
        sums = torch.stack([squares[key] for key in keys])
        dist.all_reduce(sums, group=group)
        squares |= dict(zip(keys, sums.unbind(), strict=True))
    return torch.stack(list(squares.values())).sum() if squares else torch.zeros((), device=device)


@torch.no_grad()
def plan_clipping(norm: torch.Tensor, max_norm: float | None) -> ClipVerdict:
    """Decide on the device how a step scales its gradients and whether it is skipped.

    `max_norm` None: no clipping, but a norm that is not finite still skips the step.
    """
    found_inf = norm.isfinite().logical_not().to(torch.float32)
    scale = None
    if max_norm is not None:
        scale = (max_norm / (norm + NORM_FLOOR)).clamp(max=1.0).to(torch.float32)
    return ClipVerdict(norm, scale, found_inf)


@torch.no_grad()
def fsdp2_clip_grad_norm(
    params: Iterable[torch.nn.Parameter], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale gradients in place so that their global norm is at most `max_norm`; return the norm.

    For use with foreign optimizers. Ours take a `ClipVerdict`, which spares this pass over memory.
    A norm that is not finite makes the gradients not finite, as torch's own function does.
    Collective over: every axis on which a parameter is cut, and those of pending gradients.
    """
    params = list(dict.fromkeys(params))
    norm = gradient_norm(params, norm_type)
    scale = plan_clipping(norm, max_norm).scale
    assert scale is not None
    grads = [local_tensor(param.grad) for param in params if param.grad is not None]
    multi_tensor_scale(grads, scale)
    return norm
