from __future__ import annotations

import pytest

from fsdpbench.bench.records import TrialStatus
from fsdpbench.reports.plots import (
    MAX_BARS,
    choose_byte_scale,
    choose_time_scale,
    plain,
    plan_charts,
    plotly_javascript,
)
from fsdpbench.units import GIB, MIB
from tests.reports.example_runs import (
    SYNC_RUNS,
    make_cpu_record,
    make_failed,
    make_mixed_records,
    make_record,
    make_sync_only,
    make_synced,
)


def charts_of(records):
    return {figure.key: figure for figure in plan_charts(records)}


def test_bars_show_median_and_interval_of_each_measured_trial():
    records = [make_record(0, step_seconds=[0.4, 0.5, 0.42]), make_record(1, step_seconds=[0.6])]
    trace = charts_of(records)["step-time"].traces[0]
    assert trace["x"] == pytest.approx([420, 600])
    assert trace["error_x"]["array"] == pytest.approx([80, 0])
    assert trace["error_x"]["arrayminus"] == pytest.approx([20, 0])
    assert trace["text"] == ["420 ms", "600 ms"]


def test_memory_bars_of_gpus_and_of_processes():
    traces = charts_of([make_record(0)])["memory"].traces
    assert [(t["name"], t["x"]) for t in traces] == [
        ("peak device", [18.0]),
        ("peak reserved", [20.0]),
        ("device total", [22.0]),
    ]
    figure = charts_of([make_cpu_record(0)])["memory"]
    assert [(t["name"], t["x"], t["text"]) for t in figure.traces] == [
        ("peak host", [420.0], ["420.00 MiB"])
    ]


def test_a_missing_memory_column_draws_no_bar():
    traces = charts_of([make_record(0, device_total_bytes=None)])["memory"].traces
    assert [trace["name"] for trace in traces] == ["peak device", "peak reserved"]


def test_phases_are_stacked_without_those_of_the_start():
    figure = charts_of([make_record(0)])["phases"]
    assert figure.layout["barmode"] == "stack"
    assert [trace["name"] for trace in figure.traces] == [
        "forward",
        "backward",
        "clip",
        "optimizer",
    ]
    assert figure.traces[0]["x"] == pytest.approx([120.0])


def test_the_trade_off_is_coloured_by_the_mesh_and_marks_the_best():
    figure = charts_of(make_mixed_records())["trade-off"]
    assert [trace["name"] for trace in figure.traces] == ["fsdp:d2", "fsdp:t2", "fsdp:c2"]
    assert figure.traces[0]["text"] == ["best", "", "", ""]
    assert figure.traces[0]["x"][0] == 18.0
    assert figure.traces[0]["y"][0] == 20480.0


def test_failures_draw_no_bars_but_contaminated_trials_do():
    figure = charts_of(make_mixed_records())["step-time"]
    assert len(figure.traces[0]["y"]) == 9


@pytest.mark.parametrize("records", [[], [make_failed(0, TrialStatus.HANG)]])
def test_charts_without_data_say_so(records):
    for figure in plan_charts(records):
        assert not figure.traces
        assert figure.empty_reason


def test_a_record_without_phases_or_memory_has_its_reason():
    bare = make_record(
        0, phases={}, peak_device_bytes=None, peak_reserved_bytes=None, device_total_bytes=None
    )
    charts = charts_of([bare])
    assert charts["phases"].empty_reason == "No phases were recorded; the tracer was off."
    assert charts["memory"].empty_reason == "No memory was recorded."
    assert charts["step-time"].traces


def test_pauses_are_drawn_where_weights_were_sent():
    charts = charts_of([make_synced(0), make_sync_only(1), make_record(2)])
    assert charts["sync-pause"].traces[0]["x"] == pytest.approx([100, 200])
    assert len(charts["step-time"].traces[0]["x"]) == 2
    assert "sync-pause" not in charts_of([make_record(2)])


def test_weight_updates_are_no_phase_of_a_step():
    phases = {"forward": 0.1, "update_weights": 9.0}
    figure = charts_of([make_synced(0, phases=phases), make_sync_only(1)])["phases"]
    assert [(trace["name"], trace["x"]) for trace in figure.traces] == [("forward", [100.0])]


@pytest.mark.parametrize("records", SYNC_RUNS.values(), ids=SYNC_RUNS)
def test_a_chart_without_data_gives_its_reason_where_weights_were_sent(records):
    trained = any(record.step_seconds for record in records)
    for key, figure in charts_of(records).items():
        assert bool(figure.traces) != bool(figure.empty_reason)
        if key in ("step-time", "phases") and not trained:
            assert figure.empty_reason == "No training step was measured."


def test_of_many_trials_the_best_are_drawn_and_the_caption_says_so():
    figure = charts_of([make_record(index) for index in range(100)])["step-time"]
    assert len(figure.traces[0]["x"]) == MAX_BARS
    assert f"The best {MAX_BARS} of 100 trials are drawn." in figure.caption


def test_labels_are_distinct_and_escaped():
    records = [make_record(index, axes={"note": "<b>same</b>"}) for index in range(3)]
    labels = charts_of(records)["step-time"].traces[0]["y"]
    assert len(set(labels)) == 3
    assert not any("<b>" in label for label in labels)
    assert plain("<a href='x'>&") == "&lt;a href='x'&gt;&amp;"


def test_scales_suit_the_largest_value():
    assert choose_byte_scale([MIB, 2 * GIB]) == (GIB, "GiB")
    assert choose_byte_scale([]) == (MIB, "MiB")
    assert choose_time_scale([0.1, 0.9]) == (1e-3, "ms")
    assert choose_time_scale([0.1, 1.5]) == (1.0, "s")


def test_the_javascript_is_the_whole_library():
    script = plotly_javascript()
    assert len(script) > 1_000_000
    assert "plotly.js" in script[:200]
