import gc
import json
import math
import time

import pytest

from fsdpbench.bench.timing import (
    StepLog,
    StepRecord,
    set_aside_objects,
    summarise_phases,
    summarise_rate,
    time_step,
)
from fsdpbench.engine.tracing.events import SpanEvent


def record(step, seconds, *, warmup=False, num_tokens=100, loss=1.0):
    return StepRecord(step, seconds, loss, 0.5, num_tokens, warmup)


def span(name, start, seconds, depth=1, thread=1, device=None, error=None):
    return SpanEvent(
        name,
        "other",
        thread,
        depth,
        round(start * 1e9),
        seconds,
        device_seconds=device,
        error=error,
    )


def test_a_step_is_timed_between_two_synchronisations():
    calls = []

    def synchronize():
        calls.append("sync")
        time.sleep(0.02)

    def run():
        calls.append("run")
        return 7

    result, seconds = time_step(run, synchronize)
    assert result == 7
    assert calls == ["sync", "run", "sync"]
    assert 0.02 <= seconds < 0.04  # the second wait belongs to the step, the first does not


def test_the_log_can_be_read_after_each_line(tmp_path):
    path = tmp_path / "steps.jsonl"
    with StepLog(path) as log:
        for number in range(3):
            log.append(record(number, 0.1, warmup=number == 0))
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            assert [line["step"] for line in lines] == list(range(number + 1))
    assert lines[0] == {
        "step": 0,
        "seconds": 0.1,
        "loss": 1.0,
        "grad_norm": 0.5,
        "num_tokens": 100,
        "warmup": True,
    }


@pytest.mark.parametrize(
    ("value", "text"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")]
)
def test_non_finite_losses_stay_strict_json(tmp_path, value, text):
    path = tmp_path / "steps.jsonl"
    with StepLog(path) as log:
        log.append(record(0, 0.1, loss=value))
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["loss"] == text


def test_rate_is_the_median_of_measured_steps():
    steps = [record(0, 9.0, warmup=True), record(1, 1.0), record(2, 2.0), record(3, 4.0)]
    assert summarise_rate(steps, [100, 100, 100, 100]) == 50
    assert summarise_rate(steps, [100, 10, 100, 800]) == 50
    assert summarise_rate(steps[:1], [100]) is None


def test_phases_are_summed_in_a_step_then_medians():
    events = [span("init", 0, 5, depth=0), span("load", 1, 2)]
    for number, forward in enumerate([9.0, 1.0, 2.0, 3.0]):
        start = 100 * number + 10
        events += [
            span("step", start, 90, depth=0),
            span("forward", start + 1, 50, device=forward),
            span("forward", start + 52, 20, device=forward),
            span("optimizer", start + 80, 5),
        ]
    events.append(span("io", 20, 1, thread=2))
    phases = summarise_phases(reversed(events), num_warmup=1)
    assert phases == {"init": 5, "load": 2, "forward": 4, "optimizer": 5}


def test_a_phase_of_some_steps_only_counts_as_zero_in_the_others():
    events = [span("step", 10 * number, 9, depth=0) for number in range(3)]
    events.append(span("save", 11, 4))
    assert summarise_phases(events, num_warmup=0) == {"save": 0}


def test_nested_spans_of_one_name_count_once():
    events = [span("step", 0, 9, depth=0), span("comm", 1, 4), span("comm", 2, 1, depth=2)]
    assert summarise_phases(events, num_warmup=0) == {"comm": 4}


def test_no_spans_no_phases():
    assert summarise_phases([], num_warmup=2) == {}


class Node:
    """A part of a cycle."""


def make_cycle():
    node = Node()
    node.itself = node
    return node


def count_nodes():
    return sum(type(found) is Node for found in gc.get_objects())


def test_what_lives_is_set_aside_and_garbage_is_still_collected():
    kept = make_cycle()
    make_cycle()
    try:
        set_aside_objects()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
        assert count_nodes() == 0, "one was collected, the other is out of the collector's sight"
        make_cycle()
        assert gc.collect() >= 1
        assert count_nodes() == 0
    finally:
        gc.unfreeze()
    assert count_nodes() == 1
    assert kept.itself is kept
