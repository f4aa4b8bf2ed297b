"""Spans cover everything once and stay within the bound on a tile's elements."""

from __future__ import annotations

import itertools

import pytest

from fsdpbench.engine.ops.chunked import VOCAB_ALIGNMENT, plan_spans, plan_vocab_spans


@pytest.mark.parametrize(("length", "span"), [(1, 1), (7, 3), (9, 3), (5, 100), (0, 4)])
def test_spans_cover_once(length, span):
    spans = plan_spans(length, span)
    covered = list(itertools.chain(*(range(*bounds) for bounds in spans)))
    assert covered == list(range(length))
    assert all(stop - start <= span for start, stop in spans)


@pytest.mark.parametrize("num_tokens", [1, 37, 1024, 16384])
@pytest.mark.parametrize("vocab", [50, 512, 49152, 151936])
@pytest.mark.parametrize("chunk", [1, 256, 1024])
def test_tiles_hold_chunk_times_vocab_elements(num_tokens, vocab, chunk):
    spans = plan_vocab_spans(num_tokens, vocab, chunk)
    assert spans[0][0] == 0
    assert spans[-1][1] == vocab
    assert all(left[1] == right[0] for left, right in itertools.pairwise(spans))
    widest = max(stop - start for start, stop in spans)
    assert num_tokens * widest <= chunk * vocab + num_tokens * VOCAB_ALIGNMENT
    assert all(start % VOCAB_ALIGNMENT == 0 for start, _ in spans)


def test_few_tokens_need_one_tile():
    assert plan_vocab_spans(512, 151936, 1024) == [(0, 151936)]
