"""What the per-layer step moves at a time: blocks of pieces of parameters. Arithmetic only.

A block is what one FSDP unit holds. What lies outside of the units (embedding, last norm, head) is
cut into pieces and packed into blocks no larger than the largest unit, so that no block decides
alone how much device memory the step needs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdpbench.engine.optim.multi_tensor import Piece

Block = tuple[Piece, ...]

# Pieces begin at multiples of this, so that vector kernels see the runs of the whole parameter.
PIECE_ELEMENTS = 1024
LONE_BLOCK_ELEMENTS = 1 << 26  # where there is no unit to go by: 256 MiB a float32 tensor


def find_blocks(model: nn.Module) -> list[list[nn.Parameter]]:
    """List the parameters of each FSDP unit below the root; a nested unit's only in its own."""
    units = [m for m in model.modules() if isinstance(m, FSDPModule) and m is not model]
    seen: set[nn.Parameter] = set()
    blocks = []
    for unit in reversed(units):  # inner units come behind outer ones
        block = [param for param in unit.parameters() if param not in seen]
        seen.update(block)
        blocks.append(block)
    return blocks[::-1]


def plan_blocks(lengths: Sequence[int], units: Sequence[Collection[int]]) -> list[Block]:
    """Spread parameters of these lengths over blocks; `units` names those that stay together.

    Every parameter is covered, an empty one by an empty piece. Units keep their order; the rest
    follows.
    """
    blocks = [tuple(Piece(i, 0, lengths[i]) for i in sorted(unit)) for unit in units if unit]
    largest = max((size_of(block) for block in blocks), default=LONE_BLOCK_ELEMENTS)
    inside = {index for unit in units for index in unit}
    rest = [index for index in range(len(lengths)) if index not in inside]
    return blocks + _pack(lengths, rest, max(largest, PIECE_ELEMENTS))


def size_of(block: Block) -> int:
    """Return the number of elements of a block."""
    return sum(piece.length for piece in block)


def _pack(lengths: Sequence[int], indices: Sequence[int], max_elements: int) -> list[Block]:
    """Fill blocks of at most `max_elements`; a cut falls on a multiple of PIECE_ELEMENTS."""
    blocks: list[Block] = []
    current: list[Piece] = []
    room = max_elements
    for index in indices:
        start, left = 0, lengths[index]
        while left > room:
            taken = room // PIECE_ELEMENTS * PIECE_ELEMENTS
            if taken:
                current.append(Piece(index, start, taken))
            blocks.append(tuple(current))
            current, room = [], max_elements
            start, left = start + taken, left - taken
        current.append(Piece(index, start, left))
        room -= left
    return [*blocks, tuple(current)] if current else blocks
