"""Buckets hold every wanted row once, in the files' order, within the limit."""

from __future__ import annotations

import pytest
import torch

from fsdpbench.engine.parallel.weight_buckets import (
    ALIGNMENT,
    Span,
    largest_bucket_bytes,
    plan_buckets,
)

SPANS = [
    Span("late", torch.float32, (10, 6), slice(0, 10), "b", 100),
    Span("part", torch.bfloat16, (9, 5), slice(3, 8), "a", 8),
    Span("early", torch.float64, (7,), slice(0, 7), "b", 0),
    Span("none", torch.float32, (4, 2), slice(2, 2), "a", 0),
    Span("hollow", torch.float32, (4, 0), slice(0, 4), "a", 4),
]


@pytest.mark.parametrize("bucket_bytes", [24, 50, 64, 1000])
def test_every_wanted_row_travels_once(bucket_bytes):
    buckets = plan_buckets(SPANS, bucket_bytes)
    rows = {}
    for bucket in buckets:
        assert bucket.num_bytes <= bucket_bytes
        end = 0
        for piece in bucket.pieces:
            assert piece.bucket_offset_bytes >= end
            assert piece.bucket_offset_bytes % ALIGNMENT == 0
            end = piece.bucket_offset_bytes + piece.num_bytes
            first = piece.first_row
            rows.setdefault(piece.name, []).extend(range(first, first + piece.shape[0]))
        assert end == bucket.num_bytes
    assert rows == {"part": [3, 4, 5, 6, 7], "early": list(range(7)), "late": list(range(10))}
    assert largest_bucket_bytes(buckets) <= bucket_bytes


def test_pieces_follow_the_files_and_know_their_bytes():
    pieces = [piece for bucket in plan_buckets(SPANS, 64) for piece in bucket.pieces]
    order = [(piece.source, piece.source_offset_bytes) for piece in pieces]
    assert order == sorted(order)
    for piece in pieces:
        span = next(span for span in SPANS if span.name == piece.name)
        row_bytes = span.dtype.itemsize * torch.Size(span.shape[1:]).numel()
        assert piece.source_offset_bytes == span.offset_bytes + piece.first_row * row_bytes
        assert piece.num_bytes == piece.shape[0] * row_bytes


def test_a_row_larger_than_a_bucket_has_one_of_its_own():
    spans = [
        Span("small", torch.float32, (2,), slice(0, 2), "", 0),
        Span("wide", torch.float32, (2, 100), slice(0, 2), "", 8),
    ]
    assert [b.num_bytes for b in plan_buckets(spans, 64)] == [8, 400, 400]


def test_no_rows_no_buckets():
    assert plan_buckets([]) == []
    assert largest_bucket_bytes([]) == 0


def test_a_piece_is_seen_through_the_bucket():
    values = torch.arange(12, dtype=torch.float32).view(4, 3)
    (bucket,) = plan_buckets([Span("a", torch.float32, (4, 3), slice(1, 3))])
    memory = values[1:3].reshape(-1).view(torch.uint8)
    assert torch.equal(bucket.pieces[0].view_in(memory), values[1:3])
