import io

import pytest
from rich.console import Console

from fsdpbench.bench.folders import Heartbeat
from fsdpbench.bench.progress import (
    ProgressDisplay,
    describe_axes,
    describe_result,
    estimate_seconds,
)
from fsdpbench.bench.records import Record
from fsdpbench.bench.sync_record import SyncRecord
from tests.bench.fakes import make_spec


@pytest.mark.parametrize(
    ("durations", "waiting", "running", "seconds"),
    [
        ([], 3, 1.0, None),
        ([10.0, 20.0], 2, None, 30.0),
        ([10.0, 20.0], 2, 5.0, 40.0),
        ([10.0], 0, 25.0, 0.0),
        ([10.0], 0, None, 0.0),
    ],
)
def test_the_rest_is_estimated_from_the_mean(durations, waiting, running, seconds):
    assert estimate_seconds(durations, waiting, running) == seconds


def show(is_terminal):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=is_terminal, width=200, color_system=None)
    display = ProgressDisplay(console)
    specs = [make_spec({"parallel": f"fsdp:d{n}", "on": True}) for n in (1, 2)]
    display.start_sweep(2, 3)
    display.finish_trial(Record(id="i", status="invalid", axes={"x": "[red]"}, reason="no\nmore"))
    for spec, status in zip(specs, ("ok", "crashed"), strict=True):
        display.start_trial(spec)
        display.show_beat(spec, [Heartbeat(0, 1.0, "forward", 7), Heartbeat(1, 0.5, "load")])
        display.finish_trial(
            Record(
                id=spec.id,
                status=status,
                axes=spec.axes,
                reason="rank 0 died" if status == "crashed" else None,
                tokens_per_second=1234.0,
                duration_seconds=61.0,
            )
        )
    display.finish_sweep()
    return stream.getvalue()


def test_a_log_gets_whole_lines_and_nothing_else():
    assert show(is_terminal=False).splitlines() == [
        "2 trials to run, 3 kept from before",
        "invalid  x=[red]  no",
        "[1/2] ok       parallel=fsdp:d1 on=true  1.2k tokens/s  (1 min 01 s)"
        "  about 1 min 01 s left",
        "[2/2] crashed  parallel=fsdp:d2 on=true  rank 0 died  (1 min 01 s)",
    ]


def test_a_terminal_gets_the_lines_and_a_live_one():
    shown = show(is_terminal=True)
    assert "[1/2] ok       parallel=fsdp:d1 on=true  1.2k tokens/s  (1 min 01 s)" in shown
    assert "\x1b[" in shown


def test_axes_on_one_line():
    assert describe_axes({"a": True, "b": None, "c": 1.5}) == "a=true b=null c=1.5"
    assert describe_axes({}) == "base"


def test_a_dumb_terminal_gets_whole_lines_without_control_codes():
    stream = io.StringIO()
    console = Console(
        file=stream, force_terminal=True, width=20, _environ={"TERM": "dumb", "COLUMNS": "20"}
    )
    display = ProgressDisplay(console)
    display.start_sweep(2, 0)
    spec = make_spec({"parallel": "fsdp:d1"})
    display.start_trial(spec)
    display.show_beat(spec, [Heartbeat(0, 1.0, "forward", 7)])
    for reason in ("\x1b[31mred\x1b[0m\nmore", "\x1b[0m", "\n"):
        display.finish_trial(
            Record(id=spec.id, status="crashed", axes={"a": "\x1b[2J"}, reason=reason)
        )
    display.finish_sweep()
    assert not any(code in stream.getvalue() for code in "\x1b\r\x07")
    assert "red" in stream.getvalue()


def test_a_result_is_its_rate_and_its_pause():
    sync = SyncRecord(mode="disk", receivers=1, bytes=8, verified=True, pause_seconds=0.25)
    both = Record(id="a", status="ok", tokens_per_second=1500.0, sync=sync)
    assert describe_result(both) == "1.5k tokens/s, weight updates pause 250 ms"
    alone = Record(id="a", status="ok", sync=sync)
    assert describe_result(alone) == "weight updates pause 250 ms"
