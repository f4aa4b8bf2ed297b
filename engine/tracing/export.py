"""Merges the trace files of several ranks into one Chrome trace, which Perfetto opens.

A rank is a process of the trace. Its host threads are the first rows; each device stream is a row
of its own below them. Times are microseconds from the earliest span.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fsdpbench.engine.config.tracing import PerfTracerConfig
from fsdpbench.engine.tracing.events import SpanEvent, TraceHeader, load_events

FIRST_STREAM_ROW = 1000  # row numbers below it are host threads
Rows = dict[tuple[str, int], int]  # ("thread" or "stream", its identity) -> tid in the trace


def rank_trace_path(config: PerfTracerConfig, rank: int) -> Path:
    """Return where a rank's trace file goes."""
    return Path(config.output_dir) / f"rank{rank}.jsonl"


def merge_chrome_trace(paths: Iterable[str | Path], out: str | Path) -> Path:
    """Write the spans of all trace files as one Chrome trace (JSON object format)."""
    ranks = sorted((load_events(Path(path)) for path in paths), key=lambda item: item[0].rank)
    starts = [event.start_ns for _, events in ranks for event in events]
    origin_ns = min(starts, default=0)
    records: list[dict[str, Any]] = []
    for header, events in ranks:
        rows = _rows_of(events)
        records += _describe_rank(header, rows)
        for event in events:
            records += _place_span(header.rank, event, rows, origin_ns)
    target = Path(out)
    target.parent.mkdir(parents=True, exist_ok=True)
    trace = {
        "traceEvents": records,
        "displayTimeUnit": "ms",
        "otherData": {
            "origin_unix_ns": str(origin_ns),
            "dropped_spans": {str(header.rank): header.num_dropped for header, _ in ranks},
        },
    }
    target.write_text(json.dumps(trace), encoding="ascii")
    return target


def _rows_of(events: Sequence[SpanEvent]) -> dict[tuple[str, int], int]:
    threads = dict.fromkeys(event.thread for event in events)
    streams = dict.fromkeys(
        event.stream or 0 for event in events if event.device_seconds is not None
    )
    rows = {("thread", thread): index for index, thread in enumerate(threads)}
    rows |= {("stream", stream): FIRST_STREAM_ROW + index for index, stream in enumerate(streams)}
    return rows


def _describe_rank(header: TraceHeader, rows: Rows) -> list[dict[str, Any]]:
    label = f"rank {header.rank} ({header.host}, {header.device})"
    names: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", 0, {"name": label}),
        ("process_sort_index", 0, {"sort_index": header.rank}),
    ]
    for (kind, identity), row in rows.items():
        names.append(("thread_name", row, {"name": f"{kind} {identity}"}))
        names.append(("thread_sort_index", row, {"sort_index": row}))
    return [
        {"ph": "M", "pid": header.rank, "tid": row, "name": name, "args": args}
        for name, row, args in names
    ]


def _place_span(rank: int, event: SpanEvent, rows: Rows, origin_ns: int) -> list[dict[str, Any]]:
    args: dict[str, Any] = {"depth": event.depth}
    if event.error:
        args["error"] = event.error

    def place(row: int, start_ns: int, seconds: float) -> dict[str, Any]:
        return {
            "ph": "X",
            "name": event.name,
            "cat": event.category,
            "pid": rank,
            "tid": row,
            "ts": (start_ns - origin_ns) / 1e3,
            "dur": seconds * 1e6,
            "args": args,
        }

    placed = [place(rows["thread", event.thread], event.start_ns, event.host_seconds)]
    if event.device_seconds is not None and event.device_start_ns is not None:
        row = rows["stream", event.stream or 0]
        placed.append(place(row, event.device_start_ns, event.device_seconds))
    return placed
