from __future__ import annotations

import shutil

import pytest

from fsdpbench.bench.records import TrialStatus
from fsdpbench.reports.curves import MAX_CURVES, plan_loss_curves, plan_memory_curves
from fsdpbench.reports.run import load_run
from tests.reports.example_runs import make_failed, make_record, write_run


def test_memory_of_every_started_trial_in_ranking_order(mixed_run):
    curves = plan_memory_curves(mixed_run)
    assert len(curves) == 12
    assert curves[0].trial_id == "t000"
    assert curves[0].label == "1  fsdp:d2"
    assert curves[0].unit == "GiB"
    assert curves[-1].label.endswith("(hang)")
    names = {series.name for series in curves[0].series}
    assert {"allocated (allocator), rank 1", "used (NVML), rank 1"} <= names
    assert max(series.peak for series in curves[0].series) < 64


def test_a_missing_trial_folder_is_named(tmp_path):
    path = write_run(tmp_path / "run", [make_record(0), make_record(1)])
    shutil.rmtree(path / "trials" / "t000")
    (path / "trials" / "t001" / "samples.jsonl").write_text('{"t": 1.0, "sour')
    curves = plan_memory_curves(load_run(path))
    assert curves[0].empty_reason == "The folder trials/t000 is not there."
    assert curves[1].empty_reason == "trials/t001/samples.jsonl holds no memory samples."


def test_losses_come_from_the_steps(mixed_run):
    figure = plan_loss_curves(mixed_run)
    assert len(figure.traces) == 10
    best = figure.traces[0]
    assert best["x"] == [float(step) for step in range(10)]
    assert best["y"] == pytest.approx(mixed_run.records[0].losses, abs=1e-5)
    hang = figure.traces[-1]
    assert (hang["name"], hang["y"]) == ("fsdp:c2 (hang)", [6.0, 5.5])


def test_without_the_folder_the_record_has_the_losses(tmp_path):
    losses = [3.0, float("nan"), 2.0]
    path = write_run(tmp_path / "run", [make_record(0, losses=losses)])
    shutil.rmtree(path / "trials")
    trace = plan_loss_curves(load_run(path)).traces[0]
    assert (trace["x"], trace["y"]) == ([0.0, 2.0], [3.0, 2.0])


def test_no_finished_step_is_said(tmp_path):
    path = write_run(tmp_path / "run", [make_failed(0, TrialStatus.CRASHED)])
    figure = plan_loss_curves(load_run(path))
    assert (figure.traces, figure.empty_reason) == ([], "No step of any trial has finished.")


def test_many_curves_are_cut_and_the_caption_says_so(tmp_path):
    path = write_run(tmp_path / "run", [make_record(i) for i in range(20)], num_samples=1)
    figure = plan_loss_curves(load_run(path))
    assert len(figure.traces) == MAX_CURVES
    assert "Only the first curves" in figure.caption
