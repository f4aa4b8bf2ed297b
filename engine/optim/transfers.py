"""Staged copies between host memory and device buffers: what goes where, merged into long runs.

A `StageLayout` says how the tensors of one block lie in a buffer; the buffers are bytes and are
used in turn by all blocks. Host tensors that follow one another in a region become one copy, since
a copy of a few kilobytes costs as much time as one of a megabyte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fsdpbench.engine.device import Device

ALIGNMENT_BYTES = 256  # of every tensor in a region and in a buffer, for vector loads


@dataclass(frozen=True)
class Span:
    """A run of bytes of a region."""

    region: torch.Tensor  # uint8, 1D, on the host
    start: int
    nbytes: int


@dataclass(frozen=True)
class Copy:
    """A run of bytes on the host and where it lies in a buffer."""

    host: torch.Tensor  # uint8, 1D
    offset: int


@dataclass(frozen=True)
class StageLayout:
    """How one block lies in a buffer: the byte offset of each span, and the copies that fill it."""

    offsets: tuple[int, ...]
    copies: tuple[Copy, ...]
    nbytes: int


def align(nbytes: int) -> int:
    """Round up to where the next tensor may begin."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as bytes, 1D."""
    return tensor.reshape(-1).view(torch.uint8)


def plan_stage(spans: Sequence[Span]) -> StageLayout:
    """Lay spans one behind the other, and merge those that are neighbours on the host as well."""
    offsets: list[int] = []
    runs: list[Span] = []
    end = 0
    for span in spans:
        offsets.append(end)
        last = runs[-1] if runs else None
        if last and last.region is span.region and last.start + align(last.nbytes) == span.start:
            runs[-1] = Span(span.region, last.start, span.start - last.start + span.nbytes)
        elif span.nbytes:
            runs.append(span)
        end += align(span.nbytes)
    copies, offset = [], 0
    for run in runs:
        copies.append(Copy(run.region[run.start : run.start + run.nbytes], offset))
        offset += align(run.nbytes)
    return StageLayout(tuple(offsets), tuple(copies), end)


class StageRing:
    """Device buffers that blocks use in turn. The caller orders their uses by events."""

    def __init__(self, device: Device, count: int, nbytes: int) -> None:
        self.buffers = [
            torch.empty(nbytes, dtype=torch.uint8, device=device.torch_device) for _ in range(count)
        ]

    def view(self, turn: int, offset: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """View a part of the buffer of this turn as a 1D tensor."""
        buffer = self.buffers[turn % len(self.buffers)]
        return buffer[offset : offset + numel * dtype.itemsize].view(dtype)

    def fetch(self, turn: int, layout: StageLayout) -> None:
        """Enqueue the copies from the host into the buffer of this turn."""
        for copy in layout.copies:
            self.view(turn, copy.offset, torch.uint8, copy.host.numel()).copy_(
                copy.host, non_blocking=True
            )

    def store(self, turn: int, layout: StageLayout) -> None:
        """Enqueue the copies from the buffer of this turn back to the host."""
        for copy in layout.copies:
            staged = self.view(turn, copy.offset, torch.uint8, copy.host.numel())
            copy.host.copy_(staged, non_blocking=True)
