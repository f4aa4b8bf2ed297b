"""The lock of a run folder: one runner at a time, for as long as anything of it lives.

The kernel holds the lock and frees it when its holder is gone, however that ended: a file that is
left behind locks nothing. The descriptor is handed on to each trial's supervisor, so that after
the runner's sudden death the lock is free only when the supervisor has ended the trial's processes.
The file names its holder's process and host, for the message to the next.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fsdpbench.bench.stop import Interrupted
from fsdpbench.errors import FsdpbenchError

LONGEST_LINE = 400  # bytes of the file that are read; a holder's line is shorter


class RunLocked(FsdpbenchError):
    """Another runner works in the folder."""


@dataclass(frozen=True)
class Holder:
    """The process that took the lock, as its file names it."""

    pid: int
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def is_dead(self) -> bool:
        """Say whether the process is known to be gone: on another host nothing is known."""
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:
            return False
        return False


class RunLock:
    """Exclusive flock on `RUN/lock`; a context manager.

    A holder that died is waited for: its supervisor is still ending the trial, which takes a
    moment. `stop` is asked meanwhile.
    """

    def __init__(
        self,
        path: Path,
        patience_seconds: float = 15.0,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.path = path
        self._patience_seconds = patience_seconds
        self._stop = stop
        self.descriptor = -1

    def __enter__(self) -> Self:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise FsdpbenchError(f"{self.path}: cannot be written: {error.strerror}") from error
        try:
            self._acquire()
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        except OSError as error:
            os.close(self.descriptor)
            raise FsdpbenchError(f"{self.path}: cannot be locked: {error.strerror}") from error
        except (RunLocked, Interrupted):
            os.close(self.descriptor)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def _acquire(self) -> None:
        deadline = time.monotonic() + self._patience_seconds
        while not self._try():
            holder = _read_holder(self.path)
            is_alive = holder is not None and not holder.is_dead
            if is_alive or time.monotonic() > deadline:
                raise RunLocked(
                    f"{self.path.parent}: another fsdpbench ({holder or 'process unknown'}) runs "
                    "here; wait for it, or choose another --out"
                )
            if self._stop():
                raise Interrupted
            time.sleep(0.05)

    def _try(self) -> bool:
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _read_holder(path: Path) -> Holder | None:
    """Return who took the lock; None while that is being written, or if the file is damaged."""
    try:
        with path.open("rb") as file:
            words = file.read(LONGEST_LINE).decode("utf-8", errors="replace").split()
    except OSError:
        return None
    if len(words) != 2 or not words[0].isdecimal() or not words[0].isascii():
        return None
    return Holder(int(words[0]), words[1])
