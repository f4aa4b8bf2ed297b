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
from fsdpbench.engine.optim.transfers import (
    Span,
    StageLayout,
    StageRing,
    align,
    bytes_of,
    plan_stage,
)

PARAM, GRAD = "param", "grad"


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
    seats: dict[str, list[Seat]]  # weights and moments in buffers that return, gradients not
    returning: StageLayout
    fetched_only: StageLayout


@dataclass(frozen=True)
class BlockStager:
    """Plans blocks from the parameters and their states, both indexed by the pieces.

    Under no_grad. `travels` tells whether a weight or gradient has to be brought to the device.
    """

    params: Sequence[torch.nn.Parameter]
    states: Sequence[HostStates]
    travels: Callable[[torch.Tensor], bool]

    def measure(self, pieces: Sequence[Piece]) -> tuple[int, int]:
        """Return the bytes of buffers that `stage` will use: returning, fetched only."""
        returning = fetched_only = 0
        for piece in pieces:
            param, state = self.params[piece.index], self.states[piece.index]
            for dtype in state.dtypes.values():
                returning += align(piece.length * dtype.itemsize)
            assert param.grad is not None  # blocks have no other pieces
            if self.travels(param):
                returning += align(piece.length * param.dtype.itemsize)
            if self.travels(param.grad):
                fetched_only += align(piece.length * param.grad.dtype.itemsize)
        return returning, fetched_only

    def stage(self, pieces: Sequence[Piece]) -> StagedBlock:
        """Plan the buffers of one block.

        Moments come first, in the order in which they lie on the host: one copy for most blocks.
        """
        seats: dict[str, list[Seat]] = {name: [] for name in (EXP_AVG, EXP_AVG_SQ, PARAM, GRAD)}
        returning: list[Span] = []
        fetched_only: list[Span] = []
        for piece in pieces:
            state = self.states[piece.index]
            for name in (EXP_AVG, EXP_AVG_SQ):
                seats[name].append(Seat(None, len(returning), state.dtypes[name], piece.length))
                returning.append(state.span(name, piece))
        for piece in pieces:
            param = self.params[piece.index]
            for name, tensor, spans in (
                (PARAM, local_tensor(param), returning),
                (GRAD, local_gradient(param), fetched_only),
            ):
                part = flat_view(tensor)[piece.start : piece.start + piece.length]
                if self.travels(tensor):
                    seats[name].append(Seat(None, len(spans), part.dtype, piece.length))
                    spans.append(Span(bytes_of(part), 0, part.nbytes))
                else:
                    seats[name].append(Seat(part, -1, part.dtype, piece.length))
        return StagedBlock(tuple(pieces), seats, plan_stage(returning), plan_stage(fetched_only))


class StreamedUpdate:
    """The three lanes' parts of a step over blocks; holds its buffers while it lives.

    A block is planned when it is fetched, so the host plans while the bus is busy.
    """

    def __init__(
        self,
        device: Device,
        blocks: Sequence[Sequence[Piece]],
        stager: BlockStager,
        prefetch_layers: int,
        group: dict[str, Any],
        guard: StepGuard,
        steps: torch.Tensor,  # float32 [pieces of all blocks], on the device; counted up
        returned: torch.Tensor,  # the same on the host, written with the last block
    ) -> None:
        self.blocks, self.stager = blocks, stager
        self.group, self.guard = group, guard
        self.steps, self.returned = steps, returned
        self._step_views = iter(steps.unbind())
        self._staged: dict[int, StagedBlock] = {}
        returning, fetched_only = zip(*map(stager.measure, blocks), strict=True)
        count = min(len(blocks), count_buffers(prefetch_layers))
        self.returning = StageRing(device, count, max(returning))
        # read by the update alone: free again one block earlier
        count = min(len(blocks), prefetch_layers + 1)
        self.fetched_only = StageRing(device, count, max(fetched_only))

    def fetch(self, turn: int) -> None:
        """Enqueue the copies to the device."""
        block = self._staged[turn] = self.stager.stage(self.blocks[turn])
        self.returning.fetch(turn, block.returning)
        self.fetched_only.fetch(turn, block.fetched_only)

    def update(self, turn: int) -> None:
        """Enqueue the fused kernel."""
        block = self._staged[turn]
        found = {}
        for name, seats in block.seats.items():
            ring, layout = self.returning, block.returning
            if name == GRAD:
                ring, layout = self.fetched_only, block.fetched_only
            found[name] = [_find(seat, turn, ring, layout) for seat in seats]
        found[STEP] = [next(self._step_views) for _ in block.pieces]
        run_fused_adamw(self.group, found.pop(PARAM), found.pop(GRAD), found, self.guard)

    def store(self, turn: int) -> None:
        """Enqueue the copies back, and that of the step counters with the last block."""
        self.returning.store(turn, self._staged[turn].returning)
        if turn == len(self.blocks) - 1:
            self.returned.copy_(self.steps, non_blocking=True)


def _find(seat: Seat, turn: int, ring: StageRing, layout: StageLayout) -> torch.Tensor:
    if seat.resident is not None:
        return seat.resident
    return ring.view(turn, layout.offsets[seat.position], seat.dtype, seat.numel)
