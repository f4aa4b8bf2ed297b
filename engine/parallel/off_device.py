"""Bytes off a device in pieces: copied into page-locked stages, taken from there by threads.

    current stream   copy piece 0 | copy piece 1 | ... | copy piece 16 into the first stage again
    threads                       | take 0       | take 1 ...

A copy into ordinary memory waits for the host to fault its pages in, on one thread; here the device
copies at the bus's rate and several threads share the rest. Pieces of host tensors go to the
threads as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch

from fsdpbench.engine.device import Device
from fsdpbench.engine.parallel.bucket_reader import Stage

PIECE_BYTES = 16 << 20
MAX_PIECES = 16  # that may wait for the threads; each has a stage
NUM_THREADS = 8

Take = Callable[[torch.Tensor], None]  # gets a piece, [bytes] uint8, in host memory


class OffDevice:
    """Hands the bytes of tensors to threads, at most `MAX_PIECES` pieces ahead.

    A context: leaving it ends the threads, whatever waits for them.
    """

    def __init__(self) -> None:
        self._stages: list[Stage] = []
        self._num_staged = 0
        self._pending: deque[Future[None]] = deque()
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="off_device")

    def submit(self, tensor: torch.Tensor, take_from: Callable[[int], Take]) -> None:
        """Cut a contiguous tensor's bytes into pieces; `take_from(offset)` says who takes each.

        On a device, what the current stream does later does not show. Raises what earlier pieces
        have raised.
        """
        values = tensor.view(-1).view(torch.uint8)
        for start in range(0, values.numel(), PIECE_BYTES):
            if len(self._pending) >= MAX_PIECES:
                self._pending.popleft().result()
            piece = values[start : start + PIECE_BYTES]
            if piece.device.type == "cpu":
                future = self._pool.submit(take_from(start), piece)
            else:  # the threads do not see the piece, so that its memory is free for the next one
                stage = self._copy(piece)
                future = self._pool.submit(_hand_over, stage, piece.numel(), take_from(start))
            self._pending.append(future)

    def finish(self) -> None:
        """Return when all pieces are taken, or raise what one has raised."""
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        """Drop what no thread has begun and wait for the rest. Safe to call twice."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        for stage in self._stages:  # copies may still fill them
            stage.wait_until_free()
        self._stages.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _copy(self, piece: torch.Tensor) -> Stage:
        """Begin to copy a piece into the stage whose last piece has been taken."""
        if len(self._stages) < MAX_PIECES:
            device = Device(piece.device.type, piece.device.index)
            self._stages.append(Stage(PIECE_BYTES, device))
        stage = self._stages[self._num_staged % MAX_PIECES]
        self._num_staged += 1
        stage.memory[: piece.numel()].copy_(piece, non_blocking=True)
        stage.mark_copies_enqueued()
        return stage


def _hand_over(stage: Stage, num_bytes: int, take: Take) -> None:
    stage.device.make_current()  # a new thread is on device 0 and would make a context there
    stage.wait_until_free()  # filled, that is
    take(stage.memory[:num_bytes])
