"""Local views of sharded parameters and gradients: the optimizers' hot path never runs DTensor ops.

The boundary: this module alone looks into placements. Above it a parameter is a plain local tensor,
and a gradient has its parameter's layout. Functions marked "Under no_grad" do not enter it
themselves: they run a thousand times a step, and the guard costs more than they do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard, sharing memory; a plain tensor is its own shard. Under no_grad."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def reduce_pending_gradients(params: Iterable[torch.nn.Parameter]) -> None:
    """Bring gradients that are laid out otherwise than their parameters (Partial, say) into place.

    Replaces `.grad`. Under FSDP2 gradients are in place already and this does nothing.
    Collective over: the axes on which placements differ.
    """
    for param in params:
        grad = param.grad
        if not isinstance(param, DTensor) or not isinstance(grad, DTensor):
            continue
        if grad.placements != param.placements:
            param.grad = grad.redistribute(placements=param.placements)


def sharding_groups(tensor: torch.Tensor) -> list[dist.ProcessGroup]:
    """Return the process groups over which the tensor is cut; no group where ranks hold copies."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    return [
        mesh.get_group(axis)
        for axis, placement in enumerate(tensor.placements)
        # not isinstance(Shard): the strided kind of FSDP2 over TP is a class of its own
        if mesh.size(axis) > 1 and not placement.is_replicate() and not placement.is_partial()
    ]


def local_gradient(param: torch.Tensor) -> torch.Tensor:
    """Return the local gradient in the strides of the local parameter; a copy if they differ.

    Under no_grad.
    """
    shard = local_tensor(param)
    assert param.grad is not None
    grad = local_tensor(param.grad)
    if grad.stride() == shard.stride() or grad.numel() <= 1:
        return grad
    return torch.empty_like(shard).copy_(grad)


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """View a dense tensor of any stride order as one dimension, in the order of its memory."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return tensor.permute(order).view(-1)


def by_device(params: Sequence[torch.nn.Parameter]) -> dict[torch.device, list[torch.nn.Parameter]]:
    """Group the parameters that have a gradient by where their local shards lie."""
    groups: dict[torch.device, list[torch.nn.Parameter]] = {}
    for param in params:
        if param.grad is not None:
            groups.setdefault(local_tensor(param).device, []).append(param)
    return groups
