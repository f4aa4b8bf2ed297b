"""Where the rows of a bucket go: into this rank's shard of a parameter, cast on the way.

Local work only; the same for rows that this rank has read and for rows that it was sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from fsdpbench.engine.parallel.regions import Region, local_shard, plan_local_region
from fsdpbench.engine.parallel.weight_buckets import Bucket, Piece

CHUNK_BYTES = 8 << 20  # of rows cast or compared at once, which bounds what exists besides them


class ShardTarget:
    """A parameter whose shard here is filled."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.shape = parameter.shape
        self.shard = local_shard(parameter)
        self.region = plan_local_region(parameter)

    def place(self, piece: Piece, values: torch.Tensor) -> None:
        """Take what belongs here of the piece's `values` [rows, ...], on the device or the host."""
        for own, given in self._overlaps(piece, values):
            self._take(own, given)

    def _take(self, own: torch.Tensor, given: torch.Tensor) -> None:
        own.copy_(given)

    def _overlaps(
        self, piece: Piece, values: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield rows of the shard with their counterparts in the piece, a chunk at a time."""
        rows, other_dims = split_region(self.region)
        shard = self.shard.view(1) if self.shard.ndim == 0 else self.shard
        start = max(rows.start, piece.first_row)
        stop = min(rows.stop, piece.first_row + piece.shape[0])
        if start >= stop or shard.numel() == 0:
            return
        step = stop - start if self._takes_all_at_once(values) else rows_per_chunk(shard)
        for first in range(start, stop, step):
            end = min(first + step, stop)
            given = values[(slice(first - piece.first_row, end - piece.first_row), *other_dims)]
            yield shard[first - rows.start : end - rows.start], given

    def _takes_all_at_once(self, values: torch.Tensor) -> bool:
        # from one device to another torch casts first, into memory of its own
        return values.device == self.shard.device


class TiedCopyTarget(ShardTarget):
    """A second copy of a tied parameter: compared with the shard, which was filled before."""

    def __init__(self, parameter: torch.Tensor) -> None:
        super().__init__(parameter)
        self.differs = False

    def _take(self, own: torch.Tensor, given: torch.Tensor) -> None:
        self.differs = self.differs or not torch.equal(given.to(own), own)

    def _takes_all_at_once(self, values: torch.Tensor) -> bool:
        return False


def split_region(region: Region) -> tuple[slice, Region]:
    """Return the rows of a region and its other dims; a number is one row."""
    return (region[0], region[1:]) if region else (slice(0, 1), ())


def rows_per_chunk(shard: torch.Tensor) -> int:
    """Return how many rows of a shard a chunk has: one at least."""
    return max(1, CHUNK_BYTES // max(1, shard[0].numel() * shard.element_size()))


def place_bucket(bucket: Bucket, memory: torch.Tensor, targets: Mapping[str, ShardTarget]) -> None:
    """Hand each piece of a bucket, whose bytes are `memory`, to its target."""
    for piece in bucket.pieces:
        targets[piece.name].place(piece, piece.view_in(memory))
