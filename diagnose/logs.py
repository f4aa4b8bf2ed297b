"""Streams a log of any size through a fixed window and hands on the lines worth a look.

Note "Two-stage search". Matching every line against every rule costs a minute per 100 MB. So a
block of bytes first passes the `prefilter`; only the lines that it marks are decoded and shown to
the rules. Memory stays at one block plus a margin for the lines before and after, whatever the file's
size or the length of its lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import BinaryIO

from fsdpbench.diagnose.prefilter import Prefilter
from fsdpbench.diagnose.prefixes import CleanLine, clean_line, rank_of_path

BLOCK_BYTES = 4 << 20
MARGIN_BYTES = 64 << 10  # kept before a block, held back after it: the context of a line
SEGMENT_BYTES = 8 << 10  # a longer line is looked at in pieces of this size
LINES_BEFORE = 60
LINES_AFTER = 24

_PROGRESS = re.compile(
    r"\b(?:step|iter|iteration|epoch|global_step)\b\W{0,4}\d.*\bloss\b"
    r"|\bloss\b.{0,200}\b(?:step|iter|iteration|epoch)\b\W{0,4}\d"
    r"|\bit/s,.*\bloss\b|\btimesteps/s\b|\btps: [\d,.]+",
    re.IGNORECASE,
)
_PROGRESS_STEMS = (b"loss", b"tps: ")


@dataclass(frozen=True)
class Line:
    """One cleaned line of a log and where it stands."""

    file: str
    number: int  # from 1
    text: str
    rank: int | None = None
    actor: str | None = None
    stamp: float | None = None
    order: int = 0  # over all files, as they were read

    @property
    def stream(self) -> tuple[str, int | str | None]:
        """What one process wrote, as far as the log tells."""
        return self.file, self.rank if self.rank is not None else self.actor


@dataclass
class Candidate:
    """A line that the prefilter marked, with its surroundings decoded on demand."""

    line: Line
    _buffer: bytes = field(repr=False)
    _start: int
    _end: int

    @cached_property
    def before(self) -> list[str]:
        """Up to 60 cleaned lines before this one; those of other ranks are left out."""
        margin = self._buffer[max(0, self._start - MARGIN_BYTES) : self._start]
        return self._own(margin.splitlines()[-LINES_BEFORE * 4 :])[-LINES_BEFORE:]

    @cached_property
    def after(self) -> list[str]:
        """Up to 24 cleaned lines after this one; those of other ranks are left out."""
        margin = self._buffer[self._end + 1 : self._end + 1 + MARGIN_BYTES // 4]
        return self._own(margin.splitlines()[: LINES_AFTER * 4])[:LINES_AFTER]

    def _own(self, raw_lines: list[bytes]) -> list[str]:
        cleaned = (clean_line(decode(raw)) for raw in raw_lines)
        return [line.text for line in cleaned if self._is_own(line)]

    def _is_own(self, other: CleanLine) -> bool:
        if other.rank is not None and self.line.rank is not None:
            return other.rank == self.line.rank
        return other.actor is None or self.line.actor is None or other.actor == self.line.actor

    def find_stamp(self) -> float | None:
        """Return the time of this line or of the nearest one before it."""
        if self.line.stamp is not None:
            return self.line.stamp
        margin = self._buffer[max(0, self._start - SEGMENT_BYTES) : self._start]
        for raw in reversed(margin.splitlines()[-LINES_BEFORE:]):
            stamp = clean_line(decode(raw)).stamp
            if stamp is not None:
                return stamp
        return None


@dataclass
class LogSummary:
    """What is known of a log after it was read."""

    file: str
    num_bytes: int = 0
    num_lines: int = 0
    last_progress_line: int = 0  # 0: no line of a training step was seen
    looks_binary: bool = False


def decode(raw: bytes) -> str:
    """Decode a piece of a log; what is no UTF-8 is replaced."""
    return raw.decode("utf-8", errors="replace")


class LogScanner:
    """Reads logs block by block and calls `show` with each line that may hold a literal."""

    def __init__(self, literals: Iterable[str], show: Callable[[Candidate], None]) -> None:
        self._prefilter = Prefilter(literal.encode() for literal in literals)
        self._show = show
        self._order = 0

    def scan(self, stream: BinaryIO, file: str, rank: int | None = None) -> LogSummary:
        """Read one log to its end. `rank` stands where the lines do not say theirs."""
        summary = LogSummary(file)
        rank = rank if rank is not None else rank_of_path(file)
        buffer, start, first_line = b"", 0, 1
        while True:
            block = stream.read(BLOCK_BYTES)
            if not summary.num_bytes:
                summary.looks_binary = _looks_binary(block[:4096])
            summary.num_bytes += len(block)
            buffer += block
            end = len(buffer) if not block else _last_line_end(buffer, start)
            self._scan_region(buffer, start, end, first_line, summary, rank)
            first_line += buffer.count(b"\n", start, end)
            if not block:
                break
            keep = max(0, end - MARGIN_BYTES)
            buffer, start = buffer[keep:], end - keep
        ends_open = bool(buffer) and not buffer.endswith(b"\n")
        summary.num_lines = first_line - 1 + ends_open
        return summary

    def _scan_region(
        self,
        buffer: bytes,
        start: int,
        end: int,
        number: int,
        summary: LogSummary,
        rank: int | None,
    ) -> None:
        counted = start
        for left, right, line_start in self._find_pieces(buffer, start, end):
            number += buffer.count(b"\n", counted, line_start)
            counted = max(counted, line_start)
            clean = clean_line(decode(buffer[left:right]))
            self._order += 1
            own_rank = clean.rank if clean.rank is not None else rank
            line = Line(
                summary.file, number, clean.text, own_rank, clean.actor, clean.stamp, self._order
            )
            self._show(Candidate(line, buffer, left, right))
        position = _find_progress(buffer, start, end)
        if position >= 0:
            summary.last_progress_line = number + buffer.count(b"\n", counted, position)

    def _find_pieces(self, buffer: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield (left, right, start of its line) of each line, or piece of a long one."""
        done = start
        for offset in self._prefilter.find(memoryview(buffer)[start:end]):
            position = start + offset
            if position < done:
                continue
            line_start = buffer.rfind(b"\n", start, position) + 1 or start
            line_end = buffer.find(b"\n", position)
            line_end = len(buffer) if line_end < 0 else line_end
            if line_end - line_start <= SEGMENT_BYTES:
                yield line_start, line_end, line_start
                done = line_end
            else:
                left = line_start + (position - line_start) // SEGMENT_BYTES * SEGMENT_BYTES
                done = min(line_end, left + SEGMENT_BYTES)
                lead = max(line_start, left - SEGMENT_BYTES // 8)
                yield lead, min(line_end, done + SEGMENT_BYTES // 2), line_start


def _last_line_end(buffer: bytes, start: int) -> int:
    """Return where the region to scan ends: whole lines, a margin held back for context."""
    limit = max(start, len(buffer) - MARGIN_BYTES // 4)
    end = buffer.rfind(b"\n", start, limit) + 1
    return end if end > start else limit


def _find_progress(buffer: bytes, start: int, end: int) -> int:
    """Return where the last line of a training step begins in the region, or -1."""
    best = -1
    for stem in _PROGRESS_STEMS:
        position = end
        for _ in range(20):  # a few other uses of the word may follow the last step
            position = buffer.rfind(stem, start, position)
            if position < 0:
                break
            line_start = buffer.rfind(b"\n", start, position) + 1 or start
            line_end = buffer.find(b"\n", position, end)
            text = decode(buffer[line_start : line_end if line_end >= 0 else end][:SEGMENT_BYTES])
            if _PROGRESS.search(text):
                best = max(best, line_start)
                break
    return best


def _looks_binary(head: bytes) -> bool:
    if not head:
        return False
    odd = sum(byte < 9 or 13 < byte < 27 or 27 < byte < 32 for byte in head)
    return odd > len(head) // 20
