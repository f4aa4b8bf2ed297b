"""One per-layer step at work: what of each block travels, the buffers, and what each lane does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdpbench.engine.device import Device
from fsdpbench.engine.optim.adamw import EXP_AVG, EXP_AVG_SQ, run_fused_adamw
from fsdpbench.engine.optim.host_states import HostStates
from fsdpbench.engine.optim.multi_tensor import Piece
from fsdpbench.engine.optim.sharded import STEP, StepGuard
from fsdpbench.engine.optim.shards import flat_view, local_gradient, local_tensor
from fsdpbench.engine.optim.stream_step import count_buffers
from fsdpbench.engine.optim.transfers import Span, StageLayout, StageRing, bytes_of, plan_stage


@dataclass(frozen=True)
class Seat:
    """Where the update finds the 1D tensor of a piece."""

    resident: torch.Tensor | None  # on the device already, or
    position: int  # among the offsets of the buffer
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True)
class StagedBlock:
    """A block of a step: for each piece the seats of its four tensors, and the two layouts."""

    pieces: tuple[Piece, ...]
    seats: dict[str, list[Seat]]  # "param" and the moments in buffers that return, "grad" not
    returning: StageLayout
    fetched_only: StageLayout


def stage_block(
    pieces: Sequence[Piece],
    params: Sequence[torch.nn.Parameter],
    states: Sequence[HostStates],
    travels: Callable[[torch.Tensor], bool],
) -> StagedBlock:
    """Plan the buffers of one block. `params` and `states` are indexed by the pieces. No_grad.

    Moments come first, in the order in which they lie on the host: one copy for most blocks.
    """
    seats: dict[str, list[Seat]] = {name: [] for name in (EXP_AVG, EXP_AVG_SQ, "param", "grad")}
    returning: list[Span] = []
    fetched_only: list[Span] = []
    for piece in pieces:
        for name in (EXP_AVG, EXP_AVG_SQ):
            dtype = states[piece.index].dtypes[name]
            seats[name].append(Seat(None, len(returning), dtype, piece.length))
            returning.append(states[piece.index].span(name, piece))
    for piece in pieces:
        param = params[piece.index]
        for name, tensor, spans in (
            ("param", local_tensor(param), returning),
            ("grad", local_gradient(param), fetched_only),
        ):
            part = flat_view(tensor)[piece.start : piece.start + piece.length]
            if travels(tensor):
                seats[name].append(Seat(None, len(spans), part.dtype, piece.length))
                spans.append(Span(bytes_of(part), 0, part.nbytes))
            else:
                seats[name].append(Seat(part, -1, part.dtype, piece.length))
    return StagedBlock(tuple(pieces), seats, plan_stage(returning), plan_stage(fetched_only))


class StreamedUpdate:
    """The three lanes' parts of a step over staged blocks; holds its buffers while it lives."""

    def __init__(
        self,
        device: Device,
        blocks: Sequence[StagedBlock],
        prefetch_layers: int,
        group: dict[str, Any],
        guard: StepGuard,
        steps: torch.Tensor,  # float32 [pieces of all blocks], on the device; counted up
        returned: torch.Tensor,  # the same on the host, written with the last block
    ) -> None:
        self.blocks, self.group, self.guard = blocks, group, guard
        self.steps, self.returned = steps, returned
        self._step_views = iter(steps.unbind())
        largest = max(block.returning.nbytes for block in blocks)
        count = min(len(blocks), count_buffers(prefetch_layers))
        self.returning = StageRing(device, count, largest)
        # read by the update alone: free again one block earlier
        largest = max(block.fetched_only.nbytes for block in blocks)
        self.fetched_only = StageRing(device, min(len(blocks), prefetch_layers + 1), largest)

    def fetch(self, turn: int) -> None:
        """Enqueue the copies to the device."""
        self.returning.fetch(turn, self.blocks[turn].returning)
        self.fetched_only.fetch(turn, self.blocks[turn].fetched_only)

    def update(self, turn: int) -> None:
        """Enqueue the fused kernel."""
        block = self.blocks[turn]
        rings = {"grad": (self.fetched_only, block.fetched_only)}
        found = {
            name: [
                _find(seat, turn, *rings.get(name, (self.returning, block.returning)))
                for seat in seats
            ]
            for name, seats in block.seats.items()
        }
        found[STEP] = [next(self._step_views) for _ in block.pieces]
        run_fused_adamw(self.group, found.pop("param"), found.pop("grad"), found, self.guard)

    def store(self, turn: int) -> None:
        """Enqueue the copies back, and that of the step counters with the last block."""
        self.returning.store(turn, self.blocks[turn].returning)
        if turn == len(self.blocks) - 1:
            self.returned.copy_(self.steps, non_blocking=True)


def _find(seat: Seat, turn: int, ring: StageRing, layout: StageLayout) -> torch.Tensor:
    if seat.resident is not None:
        return seat.resident
    return ring.view(turn, layout.offsets[seat.position], seat.dtype, seat.numel)
