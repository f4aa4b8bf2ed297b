"""Standard streams that outlive their reader, for the time of one command.

Who pipes a command into `head` closes its output early. What the command does must not depend on
that: the sweep goes on, its results are kept, and the exit code says what it would have said. A
character that the stream's encoding lacks is written as an escape. Everything else that can go
wrong (a full disk behind `>`) is raised as OSError.
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _PatientFile(io.FileIO):
    """A descriptor that takes everything once its reader is gone."""

    _reader_is_gone = False

    def write(self, data: ReadableBuffer, /) -> int:
        if not self._reader_is_gone:
            try:
                return super().write(data) or 0
            except BrokenPipeError:
                self._reader_is_gone = True
        return memoryview(data).nbytes


def open_patient(stream: TextIO) -> TextIO:
    """Return a stream on the same descriptor that no closed pipe can break."""
    file = _PatientFile(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(file),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=file.isatty() or stream is sys.stderr,
    )


def guard_streams() -> None:
    """Put patient streams in place of standard output and error. For a command's start only."""
    if sys.stdout is not None:  # None: the caller closed it
        sys.stdout = open_patient(sys.stdout)
    if sys.stderr is not None:
        sys.stderr = open_patient(sys.stderr)


def flush_streams() -> None:
    """Write out what is buffered; OSError if the disk does not take it, said once only."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            if stream is sys.stdout:
                sys.stdout = None  # the interpreter would try again at its end, and complain
            raise
