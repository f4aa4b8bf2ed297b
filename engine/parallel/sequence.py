"""Collectives that autograd can cross: what is communicated, apart from what is computed around it.

Each function states its backward. Inputs and outputs are plain local tensors; nothing here knows of
models. A group of one rank costs nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 renamed them and deprecates the names that 2.11 has
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_sequence(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Concatenate the ranks' slices along `dim`; the gradient is summed and scattered back.

    For a consumer that computes something *different* on each rank (a shard of the vocabulary), so
    that every rank holds a partial gradient of the whole. Collective over: `group`.
    """
    if group.size() == 1:
        return x
    gathered: torch.Tensor = _GatherSumBackward.apply(x, group, dim)  # type: ignore[no-untyped-call]
    return gathered


def gather_sequence_replicated(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Concatenate the ranks' slices along `dim`; the gradient is this rank's slice of its own.

    For a consumer that computes the *same* thing on each rank (a loss over the whole row), so that
    every rank holds the full gradient already. Collective over: `group`, in the forward pass only.
    """
    if group.size() == 1:
        return x
    gathered: torch.Tensor = _GatherSliceBackward.apply(x, group, dim)  # type: ignore[no-untyped-call]
    return gathered


def scatter_sequence_sum(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Sum the ranks' tensors and keep this rank's slice along `dim`; the gradient is gathered.

    The inverse of `gather_sequence`: x is a summand of the whole, `dim` divides by the group's
    size. Collective over: `group`.
    """
    if group.size() == 1:
        return x
    own: torch.Tensor = _ScatterSum.apply(x, group, dim)  # type: ignore[no-untyped-call]
    return own


def exchange_all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send x[i] to rank i and receive into y[j] what rank j sent; `x` is [ranks, ...].

    The backward is the same exchange. Collective over: `group`.
    """
    if group.size() == 1:
        return x
    received: torch.Tensor = _AllToAll.apply(x, group)  # type: ignore[no-untyped-call]
    return received


class _GatherSumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return _all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _reduce_scatter(gradient, ctx.group, ctx.dim), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return _reduce_scatter(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _all_gather(gradient, ctx.group, ctx.dim), None, None


class _GatherSliceBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return _all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.chunk(ctx.group.size(), dim=ctx.dim)[ctx.group.rank()], None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_to_all(gradient, ctx.group), None


def all_gather_first_dim(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate the ranks' equal tensors along dim 0; no autograd. Collective over: `group`."""
    x = x.contiguous()
    gathered = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    _all_gather_flat(gathered, x, group=group)
    return gathered


def _all_gather(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    gathered = all_gather_first_dim(x, group)
    return gathered if dim == 0 else torch.cat(gathered.chunk(group.size()), dim=dim)


def _reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    stacked = torch.stack(x.chunk(group.size(), dim=dim))  # [ranks, ...]
    own = torch.empty_like(stacked[0])
    _reduce_scatter_flat(own, stacked.flatten(0, 1), group=group)
    return own


def _all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received
