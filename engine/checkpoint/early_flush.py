"""Let the disk begin while files are still being written.

A writer that flushes at the end leaves the disk idle until then: on a machine with much memory the
system keeps tens of GB before it writes any back by itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

POLL_SECONDS = 0.1
NUM_THREADS = 4


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
    flushes: dict[Path, Future[None]] = {}
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="early_flush") as pool:
        while not over.wait(POLL_SECONDS):
            for file in folder.glob(f"{prefix}*"):
                if file not in flushes or flushes[file].done():
                    flushes[file] = pool.submit(_flush, file)
        pool.shutdown(cancel_futures=True)


def _flush(file: Path) -> None:
    with contextlib.suppress(OSError):  # it may be gone, too
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
