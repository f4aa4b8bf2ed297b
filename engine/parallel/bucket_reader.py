"""Buckets read ahead by threads, each into a host buffer that is used again and again.

Schedule, with three stages: while the caller works on bucket i, threads read i + 1 and i + 2; when
the caller asks for i + 1, the stage of i is filled with i + 3 as soon as the copies out of it are
done. On an accelerator stages are page-locked, so that those copies run at the bus's speed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch

from fsdpbench.engine.device import Device
from fsdpbench.engine.parallel.weight_buckets import Bucket, Piece, largest_bucket_bytes
from fsdpbench.engine.parallel.weight_files import read_exactly
from fsdpbench.errors import CheckpointError

NUM_STAGES = 3
NUM_THREADS = 8
CHUNK_BYTES = 8 << 20  # of one positioned read, so that threads share a large tensor


class PieceSource(Protocol):
    """Where the bytes of pieces come from; used by several threads at once."""

    def plan_reads(self, piece: Piece, target: torch.Tensor) -> Sequence[Callable[[], None]]:
        """List calls that together fill `target`, the piece's bytes in host memory."""
        ...

    def close(self) -> None:
        """Let go of what is open."""
        ...


class FileSource:
    """Pieces that are byte ranges of files."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.chunk_bytes = chunk_bytes
        self._descriptors: dict[str, int] = {}
        self._open = ExitStack()

    def plan_reads(self, piece: Piece, target: torch.Tensor) -> list[Callable[[], None]]:
        """Cut the piece's range into chunks, each one positioned read."""
        descriptor = self._descriptor_of(piece.source)
        memory, file = target.numpy().data, Path(piece.source)

        def read(start: int) -> None:
            part = memory[start : start + self.chunk_bytes]
            read_exactly(descriptor, part, piece.source_offset_bytes + start, file)

        return [
            lambda start=start: read(start)  # type: ignore[misc]
            for start in range(0, piece.num_bytes, self.chunk_bytes)
        ]

    def close(self) -> None:
        """Close the files."""
        self._descriptors = {}
        self._open.close()

    def _descriptor_of(self, file: str) -> int:
        if file not in self._descriptors:
            try:
                descriptor = os.open(file, os.O_RDONLY)
            except OSError as error:
                raise CheckpointError(f"{file} cannot be read: {error}") from error
            self._descriptors[file] = descriptor
            self._open.callback(os.close, descriptor)
        return self._descriptors[file]


class MemorySource:
    """Pieces that are rows of tensors at hand."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def plan_reads(self, piece: Piece, target: torch.Tensor) -> list[Callable[[], None]]:
        """Copy the rows at once."""

        def copy() -> None:
            whole = self.tensors[piece.name].detach()
            rows = (whole.view(1) if whole.ndim == 0 else whole)[piece.first_row :]
            target.view(piece.dtype).view(piece.shape).copy_(rows[: piece.shape[0]])

        return [copy]

    def close(self) -> None:
        """Nothing is open."""


class Stage:
    """One host buffer, and the event after which nothing on the device reads it any more."""

    def __init__(self, num_bytes: int, device: Device) -> None:
        self.device = device
        pinned = device.is_asynchronous
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._free = device.event()

    def mark_copies_enqueued(self) -> None:
        """Say that the current stream's work so far is the last that reads the buffer."""
        self._free.record()

    def wait_until_free(self) -> None:
        """Block the host until that work is done."""
        self._free.synchronize()


class BucketReader:
    """Iterates over (bucket, stage with its bytes) in order; a context that ends its threads.

    A stage belongs to the caller until the next one is asked for. A failed read raises where its
    bucket is due. `device` is where buckets go next; the CPU keeps plain memory.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        source: PieceSource,
        device: Device,
        *,
        num_stages: int = NUM_STAGES,
        num_threads: int = NUM_THREADS,
    ) -> None:
        self.buckets, self.source = buckets, source
        stage_bytes = largest_bucket_bytes(buckets)
        count = min(num_stages, len(buckets))
        self.stages = [Stage(stage_bytes, device) for _ in range(count)]
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="bucket-reader")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)  # waits for the reads that have begun
        self.source.close()
        for stage in self.stages:  # copies still read them
            stage.wait_until_free()
        self.stages = []

    def __iter__(self) -> Iterator[tuple[Bucket, Stage]]:
        pending = [self._fill(i) for i in range(len(self.stages))]
        for index, bucket in enumerate(self.buckets):
            slot = index % len(self.stages)
            for read in pending[slot]:
                read.result()
            yield bucket, self.stages[slot]
            if index + len(self.stages) < len(self.buckets):
                self.stages[slot].wait_until_free()
                pending[slot] = self._fill(index + len(self.stages))

    def _fill(self, index: int) -> list[Future[None]]:
        memory = self.stages[index % len(self.stages)].memory
        return [
            self._pool.submit(call)
            for piece in self.buckets[index].pieces
            for call in self.source.plan_reads(
                piece,
                memory[piece.bucket_offset_bytes : piece.bucket_offset_bytes + piece.num_bytes],
            )
        ]
