"""Norm and scaling of many tensors at once with torch's own foreach kernels.

This is what Transformer Engine's and Apex's multi-tensor kernels are used for elsewhere; nothing
outside torch is needed here. Tensors are plain (local shards), of any mix of devices and dtypes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

# The CPU's norm kernel sums in float32 one after another: 6e-3 relative error at 1e8 elements.
# Short pieces keep it under 1e-6; they are as fast.
CPU_NORM_ELEMENTS = 1 << 16
PASSING_BYTES = 256 << 20  # of host tensors that lie on the computing device at a time


@dataclass(frozen=True)
class Piece:
    """A run of elements of one tensor of a list."""

    index: int
    start: int
    length: int


def plan_chunks(lengths: Sequence[int], max_elements: int) -> Iterator[list[Piece]]:
    """Yield pieces that cover tensors of these lengths, at most `max_elements` to a chunk."""
    chunk: list[Piece] = []
    room = max_elements
    for index, length in enumerate(lengths):
        start = 0
        while start < length:
            taken = min(room, length - start)
            chunk.append(Piece(index, start, taken))
            start += taken
            room -= taken
            if room == 0:
                yield chunk
                chunk, room = [], max_elements
    if chunk:
        yield chunk


@torch.no_grad()
def multi_tensor_l2norm(
    tensors: Iterable[torch.Tensor], compute_device: torch.device | None = None
) -> torch.Tensor:
    """Return the L2 norm over all tensors: `multi_tensor_norm` of order 2."""
    return multi_tensor_norm(tensors, 2.0, compute_device)


@torch.no_grad()
def multi_tensor_norm(
    tensors: Iterable[torch.Tensor],
    order: float = 2.0,
    compute_device: torch.device | None = None,
) -> torch.Tensor:
    """Return the norm (2.0 or inf) over all tensors, 0-D, in float32 or wider.

    It lies on `compute_device`, or without one where the first tensor lies. Elements are widened
    inside the kernel; no copy of a tensor is made on an accelerator. Tensors on the host pass
    through `compute_device` (from page-locked memory without waiting) in chunks of
    `PASSING_BYTES`: the CPU's kernel is slower than the bus.
    """
    groups = _by_device_and_dtype(tensors)
    if not groups:
        return torch.zeros((), device=compute_device)
    norms = [_norms_of(group, order, compute_device) for group in groups.values()]
    target = norms[0]
    joined = torch.cat([norm.to(target) for norm in norms])
    total: torch.Tensor = torch.linalg.vector_norm(joined, ord=order)
    return total


@torch.no_grad()
def multi_tensor_scale(tensors: Iterable[torch.Tensor], scale: torch.Tensor | float) -> None:
    """Multiply all tensors in place by a number or a 0-D tensor (which is not read by the host)."""
    for (device, _), group in _by_device_and_dtype(tensors).items():
        factor = scale.to(device) if isinstance(scale, torch.Tensor) else scale
        torch._foreach_mul_(group, factor)


def _by_device_and_dtype(
    tensors: Iterable[torch.Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups


def _norms_of(
    tensors: list[torch.Tensor], order: float, compute_device: torch.device | None
) -> torch.Tensor:
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    if compute_device is not None and compute_device.type != tensors[0].device.type:
        return torch.cat(list(_norms_in_passing(tensors, order, dtype, compute_device)))
    if tensors[0].device.type == "cpu":
        flat = [tensor.reshape(-1) for tensor in tensors]
        tensors = [piece for tensor in flat for piece in torch.split(tensor, CPU_NORM_ELEMENTS)]
    return torch.stack(torch._foreach_norm(tensors, order, dtype=dtype))


def _norms_in_passing(
    tensors: list[torch.Tensor], order: float, dtype: torch.dtype, device: torch.device
) -> Iterator[torch.Tensor]:
    """Yield the norms of chunks, 1D on the device; one chunk at a time lies there.

    Copies and kernels are on one stream, so the allocator may give a chunk's memory to the next.
    """
    flat = [tensor.reshape(-1) for tensor in tensors]
    lengths = [tensor.numel() for tensor in flat]
    for chunk in plan_chunks(lengths, PASSING_BYTES // tensors[0].itemsize):
        there = [
            flat[piece.index][piece.start : piece.start + piece.length].to(
                device, non_blocking=True
            )
            for piece in chunk
        ]
        yield torch.stack(torch._foreach_norm(there, order, dtype=dtype))
        del there
