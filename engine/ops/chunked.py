"""Cut a tensor dimension into runs so that temporaries stay small. Pure arithmetic, no tensors."""

from __future__ import annotations

Span = tuple[int, int]  # start, stop

VOCAB_ALIGNMENT = 256  # columns; keeps the tiles of a matrix product on whole hardware tiles


def plan_spans(length: int, span_length: int) -> list[Span]:
    """Cut `length` into spans of `span_length`, the last one shorter."""
    return [(start, min(start + span_length, length)) for start in range(0, length, span_length)]


def plan_vocab_spans(num_tokens: int, vocab_size: int, chunk_size: int) -> list[Span]:
    """Cut the vocabulary so that [num_tokens, span] holds about chunk_size x vocab_size elements.

    A span is a multiple of `VOCAB_ALIGNMENT` columns where the vocabulary has as many, hence the
    bound on elements is max(chunk_size x vocab_size, 0) + num_tokens x VOCAB_ALIGNMENT.
    """
    columns = -(-vocab_size * min(chunk_size, num_tokens) // max(num_tokens, 1))
    aligned = -(-columns // VOCAB_ALIGNMENT) * VOCAB_ALIGNMENT
    return plan_spans(vocab_size, max(aligned, VOCAB_ALIGNMENT))
