"""Let the disk begin while files are still being written.

A writer that flushes at the end leaves the disk idle until then: on a machine with much memory the
system keeps tens of GB before it writes any back by itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

POLL_SECONDS = 0.1


@contextlib.contextmanager
def flushing_early(folder: Path, prefix: str) -> Iterator[None]:
    """Flush the files of a folder whose names begin with `prefix`, again and again, in a `with`.

    Never raises: whoever writes flushes at the end, and hears of the disk's errors there.
    """
    over = threading.Event()
    follower = threading.Thread(target=_follow, args=(folder, prefix, over), daemon=True)
    follower.start()
    try:
        yield
    finally:
        over.set()
        follower.join()


def _follow(folder: Path, prefix: str, over: threading.Event) -> None:
    # no pool: it would take no work while the interpreter waits at its exit for a background save
    flushes: dict[Path, threading.Thread] = {}
    while not over.wait(POLL_SECONDS):
        with contextlib.suppress(OSError):  # the folder cannot be listed
            for file in folder.glob(f"{prefix}*"):
                if file not in flushes or not flushes[file].is_alive():
                    flushes[file] = threading.Thread(target=_flush, args=(file,), daemon=True)
                    flushes[file].start()
    for flush in flushes.values():
        flush.join()


def _flush(file: Path) -> None:
    with contextlib.suppress(OSError):  # it may be gone, too
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
