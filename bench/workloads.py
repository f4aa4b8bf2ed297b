"""The batches of a trial: sequences of real tokens, the same on every machine for one seed.

Documents are shuffled anew in each pass over the data and handed out in one order that every rank
knows: for each step, first what data-parallel index 0 gets, then index 1, and so on. So each rank
makes its own batch and knows the whole step's lengths without communication. A document longer than
a step's budget is cut and goes on in the next sequence; with fixed `sequence_lengths` documents are
joined end to end and cut to those lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch

from fsdpbench.bench.documents import MIN_LENGTH, Document, count_step_tokens
from fsdpbench.bench.records import WorkloadSpec
from fsdpbench.bench.tokens import EncodedDocument, Encoder, check_ids
from fsdpbench.errors import ConfigError, Violation

STEPS_PER_PASS = 2  # over the bundled text: so often, that even a trial of few steps learns it


@dataclass(frozen=True)
class StepBatch:
    """One step's batch of this data-parallel index, and what the whole step holds."""

    tensors: dict[str, torch.Tensor]  # input_ids, attention_mask, loss_mask: [B, L], on the CPU
    sequence_lengths: tuple[tuple[int, ...], ...]  # by data-parallel index

    @property
    def num_tokens(self) -> int:
        """Real tokens of the step over all data-parallel indices."""
        return sum(sum(lengths) for lengths in self.sequence_lengths)


def shorten_bundled(documents: Sequence[EncodedDocument], num_tokens: int) -> list[EncodedDocument]:
    """Return as many documents from the front as hold `num_tokens`, or all."""
    kept: list[EncodedDocument] = []
    for document in documents:
        if num_tokens <= 0:
            break
        kept.append(document)
        num_tokens -= len(document.ids)
    return kept


class TokenStream:
    """Endless tokens of the documents, shuffled by seed and pass."""

    def __init__(self, documents: Sequence[EncodedDocument], seed: int) -> None:
        self._documents = [document for document in documents if len(document.ids) >= MIN_LENGTH]
        if not self._documents:
            allowed = f"holds no document of {MIN_LENGTH} tokens or more"
            raise ConfigError([Violation("workload.data", "", allowed)])
        self._order = self._shuffle(seed)
        self._rest = EncodedDocument((), ())

    def _shuffle(self, seed: int) -> Iterator[EncodedDocument]:
        epoch = 0
        while True:
            order = list(self._documents)
            Random(f"{seed}/{epoch}").shuffle(order)
            yield from order
            epoch += 1

    def take(self, limit: int) -> EncodedDocument:
        """Return the next tokens of one document, `limit` at most."""
        if not self._rest.ids:
            self._rest = next(self._order)
        rest = self._rest
        piece = EncodedDocument(rest.ids[:limit], rest.is_target[:limit])
        self._rest = EncodedDocument(rest.ids[limit:], rest.is_target[limit:])
        return piece

    def fill(self, budget: int, longest: int) -> list[EncodedDocument]:
        """Return whole documents, the last one cut, that hold `budget` tokens together.

        A lone token at a cut is dropped, so the sum may be a little less.
        """
        pieces = []
        while budget >= MIN_LENGTH:
            piece = self.take(min(budget, longest))
            budget -= len(piece.ids)
            if len(piece.ids) >= MIN_LENGTH:
                pieces.append(piece)
        return pieces

    def join(self, length: int) -> EncodedDocument:
        """Return documents joined end to end and cut to exactly `length` tokens."""
        ids: list[int] = []
        targets: list[bool] = []
        while len(ids) < length:
            piece = self.take(length - len(ids))
            ids += piece.ids
            targets += piece.is_target
        return EncodedDocument(tuple(ids), tuple(targets))


def iterate_batches(
    spec: WorkloadSpec,
    documents: Sequence[Document],
    encoder: Encoder,
    *,
    dp_rank: int,
    dp_size: int,
    vocab_size: int,
    longest: int,
) -> Iterator[StepBatch]:
    """Yield the trial's batches, warm-up included, for one data-parallel index.

    `longest` is the model's longest sequence in tokens. Raises ConfigError for tokens or lengths
    that the model does not have, and for a step without anything to learn.
    """
    encoded = [encoder.encode(document) for document in documents]
    check_ids(encoded, vocab_size)
    if spec.data is None:
        encoded = shorten_bundled(encoded, STEPS_PER_PASS * count_step_tokens(spec, dp_size))
    stream = TokenStream(encoded, spec.seed)
    lengths = spec.sequence_lengths
    if lengths is not None and max(lengths) > longest:
        allowed = f"must not exceed the model's {longest} positions"
        raise ConfigError([Violation("workload.sequence_lengths", str(max(lengths)), allowed)])
    for step in range(spec.num_steps):
        by_rank = [
            stream.fill(spec.tokens_per_step, longest)
            if lengths is None
            else [stream.join(length) for length in lengths]
            for _ in range(dp_size)
        ]
        check_targets(step, by_rank)
        yield StepBatch(
            tensors=build_batch(by_rank[dp_rank]),
            sequence_lengths=tuple(tuple(len(piece.ids) for piece in pieces) for pieces in by_rank),
        )


def check_targets(step: int, by_rank: Sequence[Sequence[EncodedDocument]]) -> None:
    """Raise ConfigError when no token of a step has a loss: its mean would not exist."""
    if not any(any(piece.is_target[1:]) for pieces in by_rank for piece in pieces):
        allowed = "holds prompts only, so there is nothing to learn in it"
        remedy = "raise workload.tokens_per_step above the length of the prompts"
        raise ConfigError([Violation("workload.data", f"step {step}", allowed, remedy)])


def build_batch(pieces: Sequence[EncodedDocument]) -> dict[str, torch.Tensor]:
    """Pad sequences on the right into [B, L] tensors on the CPU."""
    shape = (len(pieces), max(len(piece.ids) for piece in pieces))
    input_ids = torch.zeros(shape, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.bool)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    for row, piece in enumerate(pieces):
        length = len(piece.ids)
        input_ids[row, :length] = torch.tensor(piece.ids)
        attention_mask[row, :length] = True
        loss_mask[row, :length] = torch.tensor(piece.is_target)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "loss_mask": loss_mask}
