"""The lock of a run folder: one runner at a time, for as long as anything of it lives.

The descriptor is handed on to each trial's supervisor, so that after the runner's sudden death the
lock is free only when the supervisor has ended the trial's processes.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Self

from fsdpbench.errors import FsdpbenchError


class RunLocked(FsdpbenchError):
    """Another runner works in the folder."""


class RunLock:
    """Exclusive flock on `RUN/lock`; a context manager."""

    def __init__(self, path: Path, patience_seconds: float = 15.0) -> None:
        self.path = path
        self._patience_seconds = patience_seconds
        self.descriptor = -1

    def __enter__(self) -> Self:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise FsdpbenchError(f"{self.path}: cannot be written: {error.strerror}") from error
        deadline = time.monotonic() + self._patience_seconds
        while not self._try():
            holder = _read_holder(self.path)
            # a dead holder's supervisor is still ending its trial: that takes a moment
            if time.monotonic() > deadline or (holder is not None and _is_alive(holder)):
                os.close(self.descriptor)
                raise RunLocked(
                    f"{self.path.parent}: another fsdpbench (process {holder or 'unknown'}) runs "
                    "here; wait for it, or choose another --out"
                )
            time.sleep(0.05)
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, f"{os.getpid()}\n".encode(), 0)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def _try(self) -> bool:
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _read_holder(path: Path) -> int | None:
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    return int(text) if text.isdigit() else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
