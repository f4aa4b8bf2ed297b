"""Which bytes travel together: tensors cut into pieces of whole rows, pieces packed into buckets.

Arithmetic only. Buckets follow the order of the files, so that a disk sees one forward scan, and
all but the last are full but for less than a row: a tensor goes on in the next bucket.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

BUCKET_BYTES = 128 << 20  # three stages of it stay below half a GiB of host memory
ALIGNMENT = 16  # of pieces in a bucket; a typed view needs its element's size


@dataclass(frozen=True)
class Span:
    """The rows of one tensor that are wanted, and where the tensor's first byte lies."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole tensor
    rows: slice  # of its first dim
    source: str = ""  # file; "" is memory
    offset_bytes: int = 0  # of the whole tensor within the source


@dataclass(frozen=True)
class Piece:
    """Consecutive whole rows of one tensor, and their place in a bucket."""

    name: str
    dtype: torch.dtype
    first_row: int
    shape: tuple[int, ...]  # first dim: the number of rows here
    source: str
    source_offset_bytes: int
    bucket_offset_bytes: int
    num_bytes: int

    def view_in(self, bucket: torch.Tensor) -> torch.Tensor:
        """Return the piece's values as a view of the bucket's bytes."""
        end = self.bucket_offset_bytes + self.num_bytes
        return bucket[self.bucket_offset_bytes : end].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Pieces that are read, sent and placed together."""

    pieces: tuple[Piece, ...]
    num_bytes: int


def plan_buckets(spans: Iterable[Span], bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Pack the rows of all spans into buckets of at most `bucket_bytes`, in the files' order.

    Only a row that is larger by itself makes a larger bucket.
    """
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    filled = 0

    def close() -> None:
        nonlocal pieces, filled
        if pieces:
            buckets.append(Bucket(tuple(pieces), filled))
        pieces, filled = [], 0

    for span in sorted(spans, key=lambda s: (s.source, s.offset_bytes)):
        row_bytes = torch.Size(span.shape[1:]).numel() * span.dtype.itemsize
        row = span.rows.start
        while row < span.rows.stop and row_bytes:
            start = -(-filled // ALIGNMENT) * ALIGNMENT
            count = min((bucket_bytes - start) // row_bytes, span.rows.stop - row)
            if count < 1:
                if pieces:
                    close()
                    continue
                start, count = 0, 1
            piece = Piece(
                span.name,
                span.dtype,
                row,
                (count, *span.shape[1:]),
                span.source,
                span.offset_bytes + row * row_bytes,
                start,
                count * row_bytes,
            )
            pieces.append(piece)
            filled = start + piece.num_bytes
            row += count
    close()
    return buckets


def largest_bucket_bytes(buckets: Iterable[Bucket]) -> int:
    """Return the memory that any one of the buckets needs."""
    return max((bucket.num_bytes for bucket in buckets), default=0)
