"""Optimizer states in host memory that look like any other state to a checkpoint.

The states of the parameters of one block lie side by side in one region, so that a block is one
copy. What a checkpoint sees are tensors over these runs, laid out as the parameter: for a DTensor
one of the same placements, whose shard lies on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fsdpbench.engine.host_memory import HostRegions
from fsdpbench.engine.optim.multi_tensor import Piece
from fsdpbench.engine.optim.shards import local_tensor
from fsdpbench.engine.optim.stream_plan import Block
from fsdpbench.engine.optim.transfers import Span, align


@dataclass(frozen=True)
class HostStates:
    """Where the states of one parameter lie: byte offsets in a region, and their dtypes."""

    region: torch.Tensor  # uint8, 1D
    starts: Mapping[str, int]
    dtypes: Mapping[str, torch.dtype]
    numel: int

    def span(self, name: str, piece: Piece) -> Span:
        """Return the bytes of one state of a piece of the parameter."""
        itemsize = self.dtypes[name].itemsize
        start = self.starts[name] + piece.start * itemsize
        return Span(self.region, start, piece.length * itemsize)

    def flat(self, name: str) -> torch.Tensor:
        """View one state of the whole parameter, 1D in the order of the parameter's memory."""
        dtype = self.dtypes[name]
        start = self.starts[name]
        return self.region[start : start + self.numel * dtype.itemsize].view(dtype)


def allocate_host_states(
    regions: HostRegions,
    blocks: Sequence[Block],
    lengths: Sequence[int],
    dtypes: Sequence[Mapping[str, torch.dtype]],
) -> list[HostStates]:
    """Allocate zero states for parameters of these lengths, one region a block.

    A parameter that is cut over blocks has a region of its own: a tensor must be one run.
    """
    states: dict[int, HostStates] = {}
    for block in blocks:
        uncut = [piece.index for piece in block if piece.length == lengths[piece.index]]
        cut = [piece.index for piece in block if piece.index not in uncut]
        for members in (uncut, *([index] for index in cut if index not in states)):
            starts, nbytes = _lay_side_by_side(members, lengths, dtypes)
            region = regions.allocate((nbytes,), torch.uint8)
            for index in members:
                states[index] = HostStates(region, starts[index], dtypes[index], lengths[index])
    return [states[index] for index in range(len(lengths))]


def _lay_side_by_side(
    members: Sequence[int], lengths: Sequence[int], dtypes: Sequence[Mapping[str, torch.dtype]]
) -> tuple[dict[int, dict[str, int]], int]:
    """Return where the states of each member begin, and where the last one ends, in bytes."""
    starts: dict[int, dict[str, int]] = {index: {} for index in members}
    end = 0
    for index in members:
        for name, dtype in dtypes[index].items():
            starts[index][name] = end
            end += align(lengths[index] * dtype.itemsize)
    return starts, end


def lay_out_as(param: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over the memory of `flat`, laid out as the parameter. Under no_grad."""
    state = torch.empty_like(param, dtype=flat.dtype, device="cpu", requires_grad=False)
    shard = local_tensor(param)
    if shard.numel():
        local_tensor(state).set_(
            flat.untyped_storage(), flat.storage_offset(), shard.size(), shard.stride()
        )
    return state
