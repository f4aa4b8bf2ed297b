"""What the step works on: sequences packed end to end in one row, without padding between them.

Shapes: T tokens of a packed row, S its sequences. Records only; they are made in `packing`. Lengths
and positions that control the host are Python numbers, so that no step reads them off a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

IGNORED_LABEL = -100


@dataclass(frozen=True, eq=False)
class PackedMicroBatch:
    """Whole sequences in one row of T tokens; padding, if any, is one more sequence at the end.

    A micro-batch without sequences is a dummy: all padding, no label, no loss weight. Ranks that
    have fewer micro-batches than their peers run dummies: a step's collectives need all ranks.
    """

    tokens: Mapping[str, torch.Tensor]  # [T, ...]: input_ids, position_ids, labels, the batch's own
    per_sequence: Mapping[str, torch.Tensor]  # [S_real, ...]
    cu_seqlens: torch.Tensor  # [S + 1] int32, the padding sequence counted
    sequence_lengths: tuple[int, ...]  # real sequences
    sequence_indices: tuple[int, ...]  # their rows in the input batch
    max_seqlen: int  # the padding sequence counted
    num_tokens: int  # T
    num_real_tokens: int

    @property
    def num_padding_tokens(self) -> int:
        """Tokens of the padding sequence; 0 if there is none."""
        return self.num_tokens - self.num_real_tokens

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        """Lengths of all sequences of `cu_seqlens`, the padding sequence included."""
        padding = self.num_padding_tokens
        return (*self.sequence_lengths, padding) if padding else self.sequence_lengths

    @property
    def is_dummy(self) -> bool:
        """True if no sequence of the batch is in here."""
        return not self.sequence_indices

    @property
    def predicted(self) -> torch.Tensor:
        """[T] bool: the token has a predecessor in its sequence, hence a log-probability."""
        return torch.roll(self.tokens["labels"] != IGNORED_LABEL, 1)

    def map_tensors(self, move: Callable[[torch.Tensor], torch.Tensor]) -> PackedMicroBatch:
        """Return a copy whose tensors went through `move`."""
        return replace(
            self,
            tokens={name: move(tensor) for name, tensor in self.tokens.items()},
            per_sequence={name: move(tensor) for name, tensor in self.per_sequence.items()},
            cu_seqlens=move(self.cu_seqlens),
        )

    def to(self, device: torch.device | str) -> PackedMicroBatch:
        """Return a copy on `device`; asynchronous only from pinned memory."""
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))


@dataclass(frozen=True, eq=False)
class MicroBatchList:
    """All micro-batches of one rank's batch, in the order in which they run."""

    microbatches: tuple[PackedMicroBatch, ...]
    num_sequences: int  # rows of the input batch
    num_positions: int  # its padded width L

    def __len__(self) -> int:
        return len(self.microbatches)

    def __iter__(self) -> Iterator[PackedMicroBatch]:
        return iter(self.microbatches)

    def __getitem__(self, number: int) -> PackedMicroBatch:
        return self.microbatches[number]

    @property
    def row_lengths(self) -> list[int]:
        """Real tokens of each row of the input batch."""
        lengths = [0] * self.num_sequences
        for microbatch in self.microbatches:
            for row, length in zip(
                microbatch.sequence_indices, microbatch.sequence_lengths, strict=True
            ):
                lengths[row] = length
        return lengths

    @property
    def num_real_tokens(self) -> int:
        """Tokens of the batch, padding not counted."""
        return sum(microbatch.num_real_tokens for microbatch in self.microbatches)

    @property
    def num_tokens(self) -> int:
        """Tokens that the model computes, padding counted."""
        return sum(microbatch.num_tokens for microbatch in self.microbatches)
