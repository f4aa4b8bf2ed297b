"""The runner over trials that take milliseconds: every end, resume, stop, lock, full disk."""

import json
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fsdpbench.bench.folders import RunFolder
from fsdpbench.bench.lock import RunLock, RunLocked
from fsdpbench.bench.processes import list_marked
from fsdpbench.bench.records import TrialStatus, Verdict
from fsdpbench.bench.runner import run_sweep
from fsdpbench.bench.store import StoreError, read_records
from fsdpbench.errors import FsdpbenchError
from tests.bench.fakes import is_alive, make_harness, make_plan, wait_until

OK = {"behave": "ok"}


def lines_of(folder):
    return folder.results_path.read_text().splitlines()


@pytest.mark.parametrize(
    ("behave", "limits", "status", "reason"),
    [
        ("ok", {}, "ok", None),
        ("crash", {}, "crashed", "the trial ended with exit code 3: ValueError: boom"),
        ("kill", {}, "crashed", "the trial died of SIGKILL"),
        ("oom", {}, "oom", "torch.OutOfMemoryError: tried to allocate 1 PiB"),
        ("silent", {}, "crashed", "the trial ended without writing an outcome"),
        ("hang", {"hang_seconds": 2.5}, "hang", "fell silent first, in forward, step 3"),
        ("endless", {"timeout_seconds": 0.6}, "timeout", "still running after its limit of 600 ms"),
    ],
)
def test_each_end_has_its_record(tmp_path, behave, limits, status, reason):
    plan = make_plan([{"behave": behave}, OK])
    first = make_plan([{"behave": behave}], **limits).points[0]
    plan = replace(plan, points=(first, *plan.points[1:]))  # a busy machine may delay the second
    result = run_sweep(plan, RunFolder(tmp_path), make_harness(), resume=False)
    record, following = result.records if behave != "ok" else (result.records[0],) * 2
    assert record.status == status
    assert (record.reason or "").endswith(reason or "")
    assert following.status == "ok", "what befalls one trial does not touch the next"
    assert result.exit_code == (0 if status == "ok" else 5)
    assert list_marked(str(tmp_path)) == []


def test_the_record_holds_what_was_measured(tmp_path):
    harness = make_harness(environment={"cpu": "x", "torch": "wrong"}, argv=["fsdpbench", "sweep"])
    result = run_sweep(make_plan([OK]), RunFolder(tmp_path), harness, resume=False)
    (record,) = result.records
    assert record.step_seconds == [0.1] * 6
    assert record.warmup_steps == 2
    assert record.tokens_per_second_per_gpu == 100.0
    assert record.peak_host_bytes == 123
    assert record.environment == {"cpu": "x", "torch": "fake"}
    assert record.command[-1] == str(tmp_path / "trials" / record.id)
    assert record.exit_code == 0
    assert record.unstable is False
    assert record.started_at.endswith("+00:00")
    sweep = json.loads((tmp_path / "sweep.json").read_text())
    assert sweep["argv"] == ["fsdpbench", "sweep"]
    assert [point["id"] for point in sweep["points"]] == [record.id]


def test_invalid_points_are_recorded_with_why(tmp_path):
    plan = make_plan([OK, {"invalid": "does not fit"}])
    notes = make_harness()
    result = run_sweep(plan, RunFolder(tmp_path), notes, resume=False)
    assert [record.status.value for record in result.records] == ["ok", "invalid"]
    assert result.records[1].reason == "backend='x': does not fit"
    assert result.exit_code == 0
    assert not (tmp_path / "trials" / plan.points[1].id).exists()


def test_a_failure_is_explained_and_a_failing_explainer_is_survived(tmp_path, caplog):
    seen = []

    def explain(folder, record):
        seen.append((folder.name, record.status))
        if record.axes["behave"] == "crash":
            return Verdict(**{"class": "other"}, cause="boom")
        raise ValueError("cannot explain")

    plan = make_plan([{"behave": "crash"}, {"behave": "kill"}, OK])
    with caplog.at_level(logging.WARNING):
        result = run_sweep(
            plan, RunFolder(tmp_path), make_harness(on_failure=explain), resume=False
        )
    first, second, third = result.records
    assert first.verdict.cause == "boom"
    assert second.verdict is third.verdict is None
    assert seen == [(first.id, TrialStatus.CRASHED), (second.id, TrialStatus.CRASHED)]
    assert "cannot explain" in caplog.text


def test_results_are_not_overwritten_without_resume(tmp_path):
    plan = make_plan([OK])
    run_sweep(plan, RunFolder(tmp_path), make_harness(), resume=False)
    with pytest.raises(FsdpbenchError, match="holds 1 results already; pass --resume"):
        run_sweep(plan, RunFolder(tmp_path), make_harness(), resume=False)


def test_resume_runs_exactly_what_is_missing(tmp_path):
    folder = RunFolder(tmp_path)
    points = [{"behave": "ok", "n": n} for n in range(3)]
    run_sweep(make_plan(points[:2]), folder, make_harness(), resume=False)
    before = lines_of(folder)
    folder.results_path.write_text("\n".join(before) + '\n{"id": "torn')
    harness = make_harness()
    result = run_sweep(make_plan(points), folder, harness, resume=True)
    assert lines_of(folder)[:2] == before
    assert len(lines_of(folder)) == 3
    started = [event[1] for event in harness.observer.events if event[0] == "start"]
    assert started == [result.records[2].id]
    assert "torn last line" in result.problems[0]
    assert ("sweep", 1, 2) in harness.observer.events


def test_stop_ends_the_running_trial_and_keeps_the_rest(tmp_path):
    folder = RunFolder(tmp_path)
    plan = make_plan([OK, {"behave": "orphan", "seconds": 600.0}, {"behave": "ok", "n": 2}])
    orphan = folder.trial(plan.points[1].id).path / "orphan"
    harness = make_harness(stop=lambda: orphan.exists() and orphan.read_text() != "")
    result = run_sweep(plan, folder, harness, resume=False)
    assert result.interrupted
    assert result.exit_code == 130
    assert [record.id for record in result.records] == [plan.points[0].id]
    assert not is_alive(int(orphan.read_text()))
    assert list_marked(str(tmp_path)) == []


def test_two_runners_exclude_each_other(tmp_path):
    folder = RunFolder(tmp_path)
    with RunLock(folder.lock_path), pytest.raises(RunLocked, match=f"process {os.getpid()}"):
        run_sweep(make_plan([OK]), folder, make_harness(), resume=False)


def test_processes_of_a_dead_runner_are_ended_first(tmp_path):
    trial = tmp_path / "trials" / "old"
    trial.mkdir(parents=True)
    left = subprocess.Popen(["sleep", "600"], env={"FSDPBENCH_TRIAL": str(trial)})
    other = subprocess.Popen(["sleep", "600"], env={"FSDPBENCH_TRIAL": str(tmp_path) + "-other"})
    try:
        run_sweep(make_plan([OK]), RunFolder(tmp_path), make_harness(), resume=False)
        assert left.wait(10) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (left, other):
            process.kill()
            process.wait()


def test_a_full_disk_is_an_error_that_loses_nothing(tmp_path):
    folder = RunFolder(tmp_path)
    points = [{"behave": "ok", "n": n} for n in range(4)]
    run_sweep(make_plan(points[:1]), folder, make_harness(), resume=False)
    size = folder.results_path.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # room for the second record and half of the third; the children inherit it and need less
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size * 2.5), limits[1]))
    try:
        with pytest.raises(StoreError, match=r"results.jsonl: cannot be written: .*--resume"):
            run_sweep(make_plan(points), folder, make_harness(), resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    read = read_records(folder.results_path)
    assert read.problems == []
    assert len(read.records) == 2
    result = run_sweep(make_plan(points), folder, make_harness(), resume=True)
    assert [record.id for record in result.records] == [p.id for p in make_plan(points).points]
    assert len(lines_of(folder)) == 4


def test_a_read_only_folder_is_an_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(FsdpbenchError, match="cannot be written"):
        run_sweep(make_plan([OK]), RunFolder(blocked / "run"), make_harness(), resume=False)


NUM_CHAOS_POINTS = 4


def start_chaos(folder):
    command = [sys.executable, "-m", "tests.bench.chaos_runner", str(folder), str(NUM_CHAOS_POINTS)]
    return subprocess.Popen(command, cwd=Path(__file__).parents[2])


def kill_at(process, folder, num_records, delay_seconds):
    """SIGKILL the runner `delay_seconds` after it has stored `num_records` records."""
    results = folder / "results.jsonl"
    ready = wait_until(
        lambda: results.exists() and results.read_bytes().count(b"\n") >= num_records
    )
    assert ready
    time.sleep(delay_seconds)
    process.kill()
    process.wait()


CHAOS_SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))]


@pytest.mark.parametrize("seed", CHAOS_SEEDS)
def test_sigkill_of_the_runner_loses_nothing_and_leaves_nothing(tmp_path, seed):
    rng = random.Random(seed)
    process = start_chaos(tmp_path)
    kill_at(process, tmp_path, seed % NUM_CHAOS_POINTS, rng.uniform(0.0, 0.25))
    kept = read_records(tmp_path / "results.jsonl").records
    assert wait_until(lambda: not list_marked(str(tmp_path)), 10), "orphans of the killed runner"
    assert start_chaos(tmp_path).wait(30) == 0
    after = read_records(tmp_path / "results.jsonl")
    assert after.records[: len(kept)] == kept
    assert after.problems == []
    assert len(after.records) == len({record.id for record in after.records}) == NUM_CHAOS_POINTS
    runs = (tmp_path / "starts").read_text().split()
    assert len(runs) <= NUM_CHAOS_POINTS + 1, "only the trial that was running runs again"
    assert list_marked(str(tmp_path)) == []
