"""A thread that asks recorders for samples and appends them to the trial's `samples.jsonl`.

One JSON object a line: `t` (Unix seconds), `rank`, `source`, then the recorder's own fields; names
that end in `_bytes` are bytes. A recorder that cannot measure here says so once, in a line with the
field `unavailable`. All ranks append to one file: each line is a single write to a descriptor
opened for appending, so lines do not mix on a local file system.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

DEFAULT_INTERVAL_SECONDS = 0.5

Sample = Mapping[str, Any]


class Recorder(Protocol):
    """Something that can be asked for its present state from another thread."""

    @property
    def source(self) -> str:
        """Name in the samples: nvml, host or allocator."""
        ...

    @property
    def unavailable(self) -> str | None:
        """Why nothing can be measured here; None if something can."""
        ...

    def sample(self) -> Sample:
        """Return the present state; a value that cannot be read is None. Must not raise."""
        ...


class SampleFile:
    """The file that samples are appended to, line by line."""

    def __init__(self, path: Path, rank: int) -> None:
        self._rank = rank
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, source: str, sample: Sample) -> None:
        """Append one line."""
        line = {"t": round(time.time(), 4), "rank": self._rank, "source": source, **sample}
        os.write(self._descriptor, (json.dumps(line) + "\n").encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class Sampler:
    """Samples every recorder at an interval until it is stopped; takes one more sample then."""

    def __init__(self, recorders: Sequence[Recorder], file: SampleFile, interval: float) -> None:
        self._recorders = [recorder for recorder in recorders if recorder.unavailable is None]
        self._file = file
        self._interval = interval
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        for recorder in recorders:
            if recorder.unavailable is not None:
                file.append(recorder.source, {"unavailable": recorder.unavailable})
        self._thread.start()

    def stop(self) -> None:
        """End the thread; safe to call twice."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._take()
            self._ended.wait(self._interval)
        self._take()

    def _take(self) -> None:
        for recorder in self._recorders:
            self._file.append(recorder.source, recorder.sample())


@contextmanager
def sample_in_background(
    recorders: Sequence[Recorder],
    path: Path,
    rank: int,
    interval: float = DEFAULT_INTERVAL_SECONDS,
) -> Iterator[None]:
    """Sample while the `with` body runs; `interval` is in seconds."""
    file = SampleFile(path, rank)
    sampler = Sampler(recorders, file, interval)
    try:
        yield
    finally:
        sampler.stop()
        file.close()
