"""Blocks cover every parameter once and stay within the largest unit."""

from __future__ import annotations

import random

import pytest

from fsdpbench.engine.optim.multi_tensor import Piece
from fsdpbench.engine.optim.stream_plan import (
    LONE_BLOCK_ELEMENTS,
    PIECE_ELEMENTS,
    plan_blocks,
    size_of,
)


@pytest.mark.parametrize("seed", range(20))
def test_every_element_is_covered_once_and_no_block_exceeds_the_largest_unit(seed):
    draw = random.Random(seed)
    lengths = [draw.choice([0, 1, 7, 2048, draw.randrange(50_000)]) for _ in range(30)]
    members = draw.sample(range(30), 18)
    units = [members[start : start + 6] for start in (0, 6, 12)]
    blocks = plan_blocks(lengths, units)
    assert [{piece.index for piece in block} for block in blocks[:3]] == [set(u) for u in units]
    largest = max(PIECE_ELEMENTS, *(size_of(block) for block in blocks[:3]))
    seen: dict[int, int] = {}
    for block in blocks:
        assert size_of(block) <= largest
        assert len({piece.index for piece in block}) == len(block)
        for piece in block:
            assert piece.start == seen.get(piece.index, 0)
            assert piece.start % PIECE_ELEMENTS == 0
            seen[piece.index] = piece.start + piece.length
    assert seen == dict(enumerate(lengths))


def test_a_large_parameter_outside_of_the_units_is_cut():
    assert plan_blocks([2500, 2048, 10], [[1]]) == [
        (Piece(1, 0, 2048),),
        (Piece(0, 0, 2048),),
        (Piece(0, 2048, 452), Piece(2, 0, 10)),
    ]


def test_without_units_blocks_have_a_size_of_their_own():
    blocks = plan_blocks([LONE_BLOCK_ELEMENTS, 5], [])
    assert list(map(size_of, blocks)) == [LONE_BLOCK_ELEMENTS, 5]
    assert plan_blocks([], []) == []
