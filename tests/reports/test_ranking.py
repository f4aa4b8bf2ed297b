from __future__ import annotations

import random

import pytest

from fsdpbench.bench.records import Record, TrialStatus
from fsdpbench.reports.ranking import build_ranking, is_cpu_run, rank_records
from tests.reports.example_runs import (
    SYNC_RUNS,
    make_cpu_record,
    make_failed,
    make_mixed_records,
    make_record,
    make_sync_only,
    make_synced,
)


def texts_of(table, key):
    index = table.column_index(key)
    return [row.cells[index].text for row in table.rows]


def cell_of(table, row, key):
    return table.rows[row].cells[table.column_index(key)]


def test_ok_trials_come_best_first_then_contaminated_then_failures():
    records = make_mixed_records()
    random.Random(0).shuffle(records)
    ranked = rank_records(records)
    statuses = [record.status for record in ranked]
    assert statuses[:8] == [TrialStatus.OK] * 8
    assert statuses[8] is TrialStatus.CONTAMINATED
    assert all(status.is_failure for status in statuses[8:])
    rates = [record.tokens_per_second for record in ranked[:8]]
    assert rates == sorted(rates, reverse=True)
    assert TrialStatus.INVALID not in statuses


def test_every_column_of_a_gpu_run():
    table = build_ranking(make_mixed_records())
    assert [column.title for column in table.columns] == [
        "#",
        "parallel",
        "gradient_checkpointing",
        "offload_params",
        "tokens/s",
        "vs best",
        "tokens/s/GPU",
        "step median",
        "MFU",
        "peak device",
        "peak reserved",
        "device total",
        "peak host",
        "status",
    ]
    assert table.notes == ("The same in every trial: max_tokens_per_mb=4096.",)
    assert table.caption == "8 of 12 started trials measured, best first by tokens/s."


def test_the_numbers_of_a_row():
    records = [make_record(0), make_record(1)]
    table = build_ranking(records)
    first = {column.key: cell for column, cell in zip(table.columns, table.rows[0].cells, strict=1)}
    assert first["rate"].text == "20,480"
    assert first["difference"].text == "best"
    assert first["rate_per_device"].text == "10,240"
    assert first["mfu"].text == "52.0 %"
    assert first["peak_device"].text == "18.00 GiB"
    assert first["device_total"].text == "22.00 GiB"
    assert first["status"].text == "ok"
    expected = records[1].tokens_per_second / records[0].tokens_per_second - 1
    assert cell_of(table, 1, "difference").value == pytest.approx(expected)
    assert cell_of(table, 1, "difference").text == "-11.1 %"


def test_a_contaminated_trial_keeps_its_numbers_but_has_no_place():
    records = [make_record(1), make_record(0, status=TrialStatus.CONTAMINATED)]
    table = build_ranking(records)
    assert texts_of(table, "place") == ["1", "-"]
    assert texts_of(table, "difference") == ["best", "-"]
    assert cell_of(table, 1, "rate").text == "20,480"


def test_a_failed_trial_says_why_its_cells_are_empty():
    table = build_ranking([make_record(0), make_failed(1, TrialStatus.OOM)])
    cell = cell_of(table, 1, "rate")
    assert (cell.text, cell.reason) == ("-", "not measured: the trial ended as oom")
    assert cell_of(table, 1, "status").text == "oom"


def test_missing_nvml_and_mfu_say_so():
    table = build_ranking([make_record(0, device_total_bytes=None, mfu=None)])
    assert cell_of(table, 0, "device_total").reason == "NVML was not available"
    assert cell_of(table, 0, "mfu").reason == "the device's peak FLOP/s is not known"


def test_on_cpu_the_gpu_columns_are_one_sentence():
    records = [make_cpu_record(0), make_cpu_record(1)]
    assert is_cpu_run(records)
    table = build_ranking(records)
    keys = [column.key for column in table.columns]
    assert not {"mfu", "peak_device", "peak_reserved", "device_total"} & set(keys)
    assert "tokens/s/process" in [column.title for column in table.columns]
    assert sum("no device memory" in note for note in table.notes) == 1


def test_world_sizes_are_shown_when_they_differ():
    records = [make_record(0, world_size=2), make_record(1, world_size=4)]
    table = build_ranking(records)
    assert texts_of(table, "world_size") == ["4", "2"]
    assert any("tokens/s/GPU compares their efficiency" in note for note in table.notes)


def test_unstable_is_a_flag_on_ok():
    table = build_ranking([make_record(0, unstable=True)])
    assert cell_of(table, 0, "status").text == "ok, unstable"


def test_an_axis_set_to_null_differs_from_one_not_set():
    axes = [{"lr": None}, {}, {"lr": 0.1}]
    table = build_ranking([make_record(i, axes=values) for i, values in enumerate(axes)])
    assert texts_of(table, "axis:lr") == ["null", "-", "0.1"]


@pytest.mark.parametrize(
    ("records", "caption"),
    [
        ([], "No trial has been started."),
        ([Record(id="a", status=TrialStatus.INVALID)], "No trial has been started."),
        (
            [make_failed(0, TrialStatus.HANG), make_failed(1, TrialStatus.OOM)],
            "None of the 2 trials that were started finished.",
        ),
        ([make_record(0)], "1 of 1 started trials measured, best first by tokens/s."),
    ],
    ids=["empty", "invalid only", "no ok", "one"],
)
def test_captions_of_small_runs(records, caption):
    assert build_ranking(records).caption == caption


def test_trials_that_only_sent_weights_come_by_their_pause():
    table = build_ranking([make_sync_only(index) for index in (1, 0)])
    assert [row.key for row in table.rows] == ["t000", "t001"]
    assert table.caption.endswith("best first by the pause of a weight update.")
    assert texts_of(table, "pause") == ["100 ms", "200 ms"]
    assert texts_of(table, "transfer") == ["50 ms", "50 ms"]
    assert texts_of(table, "sync_bytes") == ["4.00 GiB"] * 2
    assert texts_of(table, "sync_share") == ["87.5 %"] * 2
    assert "rate" not in [column.key for column in table.columns]
    assert "pause of a weight update" in table.columns[0].hint


def test_trials_that_trained_and_sent_show_both():
    table = build_ranking([make_synced(0), make_record(1)])
    assert {"rate", "step", "pause"} <= {column.key for column in table.columns}
    assert cell_of(table, 1, "pause").reason == "no weights were sent"
    assert "pause" not in [c.key for c in build_ranking([make_record(1)]).columns]


def test_a_trial_that_only_sent_says_why_it_has_no_rate():
    table = build_ranking([make_record(0), make_sync_only(1)])
    for key in ("rate", "difference", "rate_per_device", "step", "mfu"):
        assert cell_of(table, 1, key).reason == "this trial only sent its weights"


@pytest.mark.parametrize("records", SYNC_RUNS.values(), ids=SYNC_RUNS)
def test_notes_and_captions_name_only_columns_that_are_there(records):
    table = build_ranking(records)
    titles = [column.title for column in table.columns]
    assert ("tokens/s" in table.caption) <= ("tokens/s" in titles)
    assert not any("tokens/s/GPU" in note for note in table.notes)
    assert all(len(row.cells) == len(titles) for row in table.rows)
