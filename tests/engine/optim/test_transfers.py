"""Staged copies: neighbours become one copy, and what is stored is what was staged."""

from __future__ import annotations

import torch

from fsdpbench.engine.device import Device
from fsdpbench.engine.optim.transfers import (
    ALIGNMENT_BYTES,
    Span,
    StageRing,
    align,
    bytes_of,
    plan_stage,
)


def make_region(nbytes=4096):
    return torch.arange(nbytes, dtype=torch.int64).remainder(251).to(torch.uint8)


def test_neighbours_are_one_copy():
    region, other = make_region(), make_region()
    spans = [Span(region, 0, 100), Span(region, align(100), 300), Span(other, 0, 8)]
    layout = plan_stage(spans)
    assert layout.offsets == (0, 256, 768)
    assert [(copy.host.numel(), copy.offset) for copy in layout.copies] == [(556, 0), (8, 768)]
    assert layout.nbytes == 1024


def test_gaps_foreign_regions_and_empty_spans_are_no_neighbours():
    region = make_region()
    layout = plan_stage([Span(region, 0, 10), Span(region, 512, 10), Span(region, 1024, 0)])
    assert [(copy.host.numel(), copy.offset) for copy in layout.copies] == [(10, 0), (10, 256)]
    assert plan_stage([]).nbytes == 0


def test_blocks_take_turns_in_the_buffers_and_come_back():
    ring = StageRing(Device("cpu"), 2, 1024)
    region = make_region()
    wanted = region.clone()
    layouts = [
        plan_stage([Span(region, i * 512, 100), Span(region, i * 512 + 256, 200)]) for i in range(4)
    ]
    for turn, layout in enumerate(layouts):
        ring.fetch(turn, layout)
        second = ring.view(turn, layout.offsets[1], torch.float32, 50)
        start = turn * 512 + 256
        assert torch.equal(bytes_of(second), wanted[start : start + 200])
        second.zero_()
        wanted[start : start + 200] = 0
        ring.store(turn, layout)
    assert torch.equal(region, wanted)
    assert len(ring.buffers) == 2
    assert {buffer.numel() for buffer in ring.buffers} == {1024}


def test_everything_begins_at_a_multiple():
    assert [align(n) for n in (0, 1, ALIGNMENT_BYTES, ALIGNMENT_BYTES + 1)] == [0, 256, 256, 512]
