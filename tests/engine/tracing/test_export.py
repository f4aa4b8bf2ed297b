"""The merged trace, read as Perfetto reads the Chrome format."""

from __future__ import annotations

import json
from pathlib import Path

from fsdpbench.engine.config.tracing import PerfTracerConfig
from fsdpbench.engine.tracing.events import SpanEvent, TraceHeader, save_events
from fsdpbench.engine.tracing.export import (
    FIRST_STREAM_ROW,
    merge_chrome_trace,
    rank_trace_path,
)

T0 = 1_800_000_000_000_000_000


def merge(tmp_path, ranks):
    paths = []
    for rank, events in ranks.items():
        paths.append(tmp_path / f"rank{rank}.jsonl")
        save_events(paths[-1], TraceHeader(rank, f"cuda:{rank}", 1, "node0", rank), events)
    return json.loads(merge_chrome_trace(paths, tmp_path / "out" / "trace.json").read_text())


def spans_of(trace, **wanted):
    spans = [record for record in trace["traceEvents"] if record["ph"] == "X"]
    return [span for span in spans if all(span[key] == value for key, value in wanted.items())]


def test_ranks_are_processes_on_one_axis(tmp_path):
    trace = merge(
        tmp_path,
        {
            1: [SpanEvent("step", "compute", 11, 0, T0 + 5_000, 0.002)],
            0: [SpanEvent("step", "compute", 22, 0, T0 + 1_500, 0.001)],
        },
    )
    (zero,), (one,) = spans_of(trace, pid=0), spans_of(trace, pid=1)
    assert (zero["ts"], zero["dur"]) == (0.0, 1000.0)
    assert (one["ts"], one["dur"]) == (3.5, 2000.0)
    names = {
        record["pid"]: record["args"]["name"]
        for record in trace["traceEvents"]
        if record["ph"] == "M" and record["name"] == "process_name"
    }
    assert names == {0: "rank 0 (node0, cuda:0)", 1: "rank 1 (node0, cuda:1)"}
    assert trace["otherData"] == {
        "origin_unix_ns": str(T0 + 1_500),
        "dropped_spans": {"0": 0, "1": 1},
    }


def test_streams_are_rows_below_the_threads(tmp_path):
    events = [
        SpanEvent("inner", "comm", 9, 1, T0 + 2_000, 1e-6, T0 + 4_000, 3e-6, 77),
        SpanEvent("outer", "compute", 9, 0, T0, 5e-6, T0 + 3_000, 5e-6, 77, "ValueError"),
        SpanEvent("load", "io", 8, 0, T0, 1e-6),
    ]
    trace = merge(tmp_path, {0: events})
    assert [(s["tid"], s["ts"]) for s in spans_of(trace, name="inner")] == [
        (0, 2.0),
        (FIRST_STREAM_ROW, 4.0),
    ]
    assert [s["args"]["error"] for s in spans_of(trace, name="outer")] == ["ValueError"] * 2
    assert [s["tid"] for s in spans_of(trace, name="load")] == [1]
    rows = {
        record["tid"]: record["args"]["name"]
        for record in trace["traceEvents"]
        if record["name"] == "thread_name"
    }
    assert rows == {0: "thread 9", 1: "thread 8", FIRST_STREAM_ROW: "stream 77"}


def test_every_record_has_what_the_format_asks_for(tmp_path):
    trace = merge(tmp_path, {0: [SpanEvent("a", "sync", 1, 0, T0, 0.5, T0, 0.25, 0)]})
    assert trace["displayTimeUnit"] == "ms"
    for record in trace["traceEvents"]:
        assert {"ph", "pid", "tid", "name", "args"} <= record.keys()
        assert isinstance(record["pid"], int)
        assert isinstance(record["tid"], int)
        if record["ph"] == "X":
            assert {"ts", "dur", "cat"} <= record.keys()
            assert record["dur"] >= 0


def test_an_empty_trace(tmp_path):
    assert spans_of(merge(tmp_path, {0: []})) == []


def test_rank_files_lie_in_the_configured_folder():
    config = PerfTracerConfig(output_dir="here")
    assert rank_trace_path(config, 3) == Path("here/rank3.jsonl")
