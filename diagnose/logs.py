"""Streams a log of any size through a fixed window and hands on the lines worth a look.

Note "Two-stage search". Matching every line against every rule costs a minute per 100 MB. So a
block of bytes first passes the `prefilter`; only the lines that it marks are decoded and shown to
the rules. Memory stays at one block plus a margin for the lines before and after, whatever the
size of the file or the length of its lines.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import BinaryIO

from fsdpbench.diagnose.log_files import SNIFFED_BYTES, looks_binary
from fsdpbench.diagnose.prefilter import Prefilter
from fsdpbench.diagnose.prefixes import CleanLine, clean_line, rank_of_path

BLOCK_BYTES = 4 << 20
MARGIN_BYTES = 64 << 10  # kept before a block, held back after it: the context of a line
SEGMENT_BYTES = 8 << 10  # a longer line is looked at in pieces of this size
LINES_BEFORE = 60
LINES_AFTER = 60
TEMPLATE_BYTES = 300  # lines that agree in so many bytes, digits left out, are alike
MAX_REPEATS = 512  # of lines alike; more say nothing new, and there may be so many ranks
MAX_TEMPLATES = 50_000

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
    """A line that holds a literal; it and its surroundings are decoded on demand."""

    literals: frozenset[str]
    """Those of the scanner's literals that stand in the line."""
    _file: str
    _number: int
    _order: int
    _rank: int | None
    _buffer: bytes = field(repr=False)
    _start: int
    _end: int

    @cached_property
    def line(self) -> Line:
        """The cleaned line."""
        clean = clean_line(decode(self._buffer[self._start : self._end]))
        rank = clean.rank if clean.rank is not None else self._rank
        said = (clean.text, rank, clean.actor, clean.stamp)
        return Line(self._file, self._number, *said, self._order)

    @cached_property
    def before(self) -> list[str]:
        """Up to 60 cleaned lines before this one; those of other ranks are left out."""
        margin = self._buffer[max(0, self._start - MARGIN_BYTES) : self._start]
        lines = margin.splitlines()[-LINES_BEFORE * 4 :]
        return list(islice(self._own(reversed(lines)), LINES_BEFORE))[::-1]

    @cached_property
    def after(self) -> list[str]:
        """Up to 60 cleaned lines after this one; those of other ranks are left out."""
        margin = self._buffer[self._end + 1 : self._end + 1 + MARGIN_BYTES // 4]
        return list(islice(self._own(margin.splitlines()[: LINES_AFTER * 4]), LINES_AFTER))

    def _own(self, raw_lines: Iterable[bytes]) -> Iterator[str]:
        for raw in raw_lines:
            clean = clean_line(decode(raw[:SEGMENT_BYTES]))
            if self._is_own(clean):
                yield clean.text

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
    """Reads logs block by block and calls `show` with each line that holds a literal."""

    def __init__(
        self, literals: Iterable[str], background: str, show: Callable[[Candidate], None]
    ) -> None:
        self._prefilter = Prefilter((text.encode() for text in literals), background.encode())
        self._show = show
        self._order = 0
        self._seen: dict[bytes, int] = defaultdict(int)

    def scan(self, stream: BinaryIO, file: str, rank: int | None = None) -> LogSummary:
        """Read one log to its end. `rank` stands where the lines do not say theirs."""
        summary = LogSummary(file)
        rank = rank if rank is not None else rank_of_path(file)
        buffer, start = b"", 0
        while True:
            block = stream.read(BLOCK_BYTES)
            if not summary.num_bytes:
                summary.looks_binary = looks_binary(block[:SNIFFED_BYTES])
            summary.num_bytes += len(block)
            buffer += block
            end = len(buffer) if not block else _last_line_end(buffer, start)
            self._scan_region(buffer, start, end, summary, rank)
            if not block:
                break
            keep = max(0, end - MARGIN_BYTES)
            buffer, start = buffer[keep:], end - keep
        summary.num_lines += bool(buffer) and not buffer.endswith(b"\n")
        return summary

    def _scan_region(
        self, buffer: bytes, start: int, end: int, summary: LogSummary, rank: int | None
    ) -> None:
        number, counted = summary.num_lines + 1, start
        for piece in self._find_pieces(buffer, start, end):
            number += buffer.count(b"\n", counted, piece.line_start)
            counted = max(counted, piece.line_start)
            raw = buffer[piece.left : piece.right]
            literals = frozenset(decode(text) for text in piece.literals if text in raw)
            if not literals or self._is_repeat(raw):
                continue
            self._order += 1
            where = (summary.file, number, self._order, rank)
            self._show(Candidate(literals, *where, buffer, piece.left, piece.right))
        position = _find_progress(buffer, start, end)
        if position >= 0:
            lines_before = buffer.count(b"\n", start, position)
            summary.last_progress_line = summary.num_lines + 1 + lines_before
        summary.num_lines += buffer.count(b"\n", start, end)

    def _is_repeat(self, raw: bytes) -> bool:
        template = raw[:TEMPLATE_BYTES].translate(None, b"0123456789")
        if len(self._seen) > MAX_TEMPLATES:
            self._seen.clear()
        self._seen[template] += 1
        return self._seen[template] > MAX_REPEATS

    def _find_pieces(self, buffer: bytes, start: int, end: int) -> Iterator[_Piece]:
        """Yield each line, or piece of a long line, in which a literal may stand."""
        piece: _Piece | None = None
        for position in self._prefilter.find(buffer, start, end):
            literals = self._prefilter.literals_at(buffer, position)
            if not literals:
                continue  # another gram with the same hash
            if piece is None or position >= piece.end:
                if piece is not None:
                    yield piece
                piece = _cut_piece(buffer, start, position)
            piece.literals.update(literals)
        if piece is not None:
            yield piece


@dataclass
class _Piece:
    """A line, or a part of a long one: what is shown of it, and where its own part ends."""

    left: int
    right: int
    end: int
    line_start: int
    literals: set[bytes] = field(default_factory=set)


def _cut_piece(buffer: bytes, start: int, position: int) -> _Piece:
    line_start = buffer.rfind(b"\n", start, position) + 1 or start
    line_end = buffer.find(b"\n", position)
    line_end = len(buffer) if line_end < 0 else line_end
    if line_end - line_start <= SEGMENT_BYTES:
        return _Piece(line_start, line_end, line_end, line_start)
    left = line_start + (position - line_start) // SEGMENT_BYTES * SEGMENT_BYTES
    end = min(line_end, left + SEGMENT_BYTES)
    lead = max(line_start, left - SEGMENT_BYTES // 8)
    return _Piece(lead, min(line_end, end + SEGMENT_BYTES // 2), end, line_start)


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
