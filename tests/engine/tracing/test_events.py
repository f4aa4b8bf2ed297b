"""Trace files: what is saved is what is loaded."""

from __future__ import annotations

import pytest

from fsdpbench.engine.tracing.events import SpanEvent, TraceHeader, load_events, save_events
from fsdpbench.errors import FsdpbenchError

HEADER = TraceHeader(rank=3, device="cuda:1", process_id=42, host="node0", num_dropped=2)
SPANS = [
    SpanEvent("forward", "compute", 7, 0, 10**18 + 123, 0.5, 10**18 + 456, 0.25, 0),
    SpanEvent('a "quoted" name', "io", 7, 1, 10**18 + 999, 1e-9, error="ValueError"),
]


def test_round_trip(tmp_path):
    path = tmp_path / "deep" / "rank3.jsonl"
    save_events(path, HEADER, SPANS)
    assert load_events(path) == (HEADER, SPANS)
    save_events(path, HEADER, [])
    assert load_events(path) == (HEADER, [])
    assert [p.name for p in path.parent.iterdir()] == ["rank3.jsonl"]


def test_seconds_are_the_devices_where_known():
    assert [span.seconds for span in SPANS] == [0.25, 1e-9]


DEEP = "[" * 100_000


@pytest.mark.parametrize("text", ["", "{}", "[1]", "no json", DEEP, '{"rank": 1, "colour": 2}'])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "rank0.jsonl"
    path.write_text(text)
    with pytest.raises(FsdpbenchError, match=r"rank0.jsonl: not a trace file"):
        load_events(path)
