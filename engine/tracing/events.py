"""What one traced span is, and how a rank's spans lie in a file.

A trace file is JSON Lines: a header with the rank's facts, then one span a line. Times are Unix
nanoseconds, so that files of several ranks lie on one axis. No torch import.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from fsdpbench.errors import FsdpbenchError

SCHEMA_VERSION = 1
Category = Literal["compute", "comm", "io", "sync", "scheduler", "other"]
CATEGORIES: tuple[str, ...] = get_args(Category)


@dataclass(frozen=True)
class SpanEvent:
    """One finished span, on the host's timeline and, where there is one, on the device's."""

    name: str
    category: str
    thread: int
    depth: int  # 0 for a span with no span around it in its thread
    start_ns: int
    host_seconds: float
    device_start_ns: int | None = None
    device_seconds: float | None = None
    stream: int | None = None
    error: str | None = None  # type of the exception that left the span

    @property
    def seconds(self) -> float:
        """What the span took: on the device where that is known, else on the host."""
        return self.host_seconds if self.device_seconds is None else self.device_seconds


@dataclass(frozen=True)
class TraceHeader:
    """Facts of the rank that a trace file is of."""

    rank: int
    device: str
    process_id: int
    host: str
    num_dropped: int = 0
    schema_version: int = SCHEMA_VERSION


def save_events(path: Path, header: TraceHeader, events: Iterable[SpanEvent]) -> None:
    """Write a trace file; a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="ascii") as file:
        file.write(_encode(asdict(header)))
        for event in events:
            file.write(_encode(asdict(event)))
    partial.replace(path)


def load_events(path: Path) -> tuple[TraceHeader, list[SpanEvent]]:
    """Read a trace file back."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]
        header, events = TraceHeader(**lines[0]), [SpanEvent(**line) for line in lines[1:]]
    except (ValueError, TypeError, IndexError, RecursionError) as error:
        raise FsdpbenchError(f"{path}: not a trace file of this release ({error})") from error
    return header, events


def _encode(record: dict[str, Any]) -> str:
    known = {name: value for name, value in record.items() if value is not None}
    return json.dumps(known) + "\n"
