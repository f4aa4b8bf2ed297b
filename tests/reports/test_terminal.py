from __future__ import annotations

import io

import pytest
from rich.console import Console

from fsdpbench.bench.records import TrialStatus
from fsdpbench.reports.terminal import MAX_ROWS, fold_title, print_ranking
from tests.reports.example_runs import (
    SYNC_RUNS,
    make_cpu_record,
    make_failed,
    make_mixed_records,
    make_record,
)


def show(records, width=200):
    console = Console(file=io.StringIO(), width=width)
    print_ranking(records, console)
    return console.file.getvalue()


def test_the_best_comes_first_with_differences():
    lines = show(make_mixed_records()).splitlines()
    rows = [line for line in lines if "fsdp:" in line and "logs in" not in line]
    assert rows[0].split()[:6] == ["1", "fsdp:d2", "false", "false", "20,480", "best"]
    assert "-11.1 %" in rows[1]
    assert "oom" in rows[-2]


def test_failures_come_with_their_first_remedy():
    text = show(make_mixed_records())
    assert "oom (2 trials, cuda_oom): rank 1 ran out of GPU memory in the backward pass" in text
    assert "to do: set gradient_checkpointing: true" in text
    assert "1 point was refused before a process was started." in text


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 120, 160, 240])
def test_no_line_is_wider_than_the_terminal(width):
    text = show(make_mixed_records(), width)
    assert max(map(len, text.splitlines())) <= width
    assert "20,480" in text


def test_columns_leave_by_priority_and_are_named():
    text = show(make_mixed_records(), 100)
    assert "vs best" in text
    assert "Too narrow for: device total, peak reserved" in text
    assert "Too narrow" not in show(make_mixed_records(), 240)


def test_a_very_narrow_terminal_gets_a_block_a_trial():
    lines = show([make_record(0), make_failed(1, TrialStatus.HANG)], 30).splitlines()
    assert "tokens/s: 20,480" in lines
    assert "peak device: 18.00 GiB" in lines
    assert "tokens/s: -" not in lines


def test_a_cpu_run_explains_the_missing_columns():
    assert "no device memory to report" in " ".join(show([make_cpu_record(0)]).split())


def test_markup_and_control_codes_are_text():
    records = [make_record(i, axes={"note": f"[bold]{i}[/bold]\x1b[31m"}) for i in range(2)]
    text = show(records)
    assert "[bold]0[/bold]" in text
    assert "\x1b" not in text


def test_long_rankings_are_cut():
    records = [make_record(i, axes={"lr": float(i)}) for i in range(MAX_ROWS + 7)]
    text = show(records)
    assert "7 more trials are in the report." in text


@pytest.mark.parametrize("records", [[], [make_failed(0, TrialStatus.TIMEOUT)]])
def test_runs_without_a_measured_trial(records):
    assert "tria" in show(records)


@pytest.mark.parametrize("width", [30, 80, 240])
@pytest.mark.parametrize("records", SYNC_RUNS.values(), ids=SYNC_RUNS)
def test_runs_that_send_weights_are_shown(records, width):
    text = show(records, width)
    assert max(map(len, text.splitlines())) <= width
    pauses = [record for record in records if record.sync is not None]
    assert ("100 ms" in text) == bool(pauses)


@pytest.mark.parametrize(
    ("title", "folded"),
    [
        ("#", "#"),
        ("tokens/s", "tokens/s"),
        ("tokens/s/GPU", "tokens/s/GPU"),
        ("gradient_checkpointing", "gradient_\ncheckpointing"),
        ("mb_spec.max_tokens_per_mb", "mb_spec.max_\ntokens_per_\nmb"),
        ("peak reserved", "peak\nreserved"),
    ],
)
def test_titles_fold_at_their_separators(title, folded):
    assert fold_title(title) == folded
