import json

import pytest

from fsdpbench.bench.folders import RunFolder, TrialFolder
from fsdpbench.bench.records import Record, TrialStatus, encode
from fsdpbench.diagnose.explain import explain_run_for_record, explain_sources
from fsdpbench.diagnose.trials import explain_run, explain_trial, is_run_folder, is_trial_folder

CLOSED = "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1."
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def make_trial(path, errors=(), logs=()):
    """errors: (rank, last line, unix seconds); logs: (name, text)."""
    folder = TrialFolder(path)
    folder.logs.mkdir(parents=True)
    folder.heartbeats.mkdir()
    (path / "errors").mkdir()
    for rank, text, when in errors:
        frames = 'Traceback (most recent call last):\n  File "/a/b.py", line 3, in run\n'
        words = {
            "rank": rank,
            "type": "x",
            "message": text,
            "traceback": f"{frames}{text}\n",
            "phase": "backward",
            "step": 4,
            "unix_seconds": when,
        }
        (path / "errors" / f"rank{rank}.json").write_text(json.dumps(words, indent=1))
    for name, text in logs:
        log = folder.logs / name
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(text)
    return folder


def record(status, **fields):
    return Record(id="abc", status=status, **fields)


def test_the_rank_that_failed_first_is_the_root(tmp_path):
    make_trial(tmp_path, [(0, CLOSED, 100.5), (1, OOM, 100.0)])
    verdict = explain_trial(tmp_path, record(TrialStatus.OOM))
    assert (verdict.failure_class, verdict.root_rank) == ("cuda_oom", 1)
    assert verdict.phase == "backward"
    path, line = verdict.evidence[0].file, verdict.evidence[0].line
    assert path.endswith("errors/rank1.json")
    assert '"traceback"' in (tmp_path / "errors" / "rank1.json").read_text().splitlines()[line - 1]


def test_a_rank_that_lost_its_peer_is_no_root(tmp_path):
    make_trial(tmp_path, [(0, "ValueError: no such thing", 100.5), (1, "PeerError: rank 0", 100.0)])
    file = tmp_path / "errors" / "rank1.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "lost_peer": True}))
    assert explain_trial(tmp_path, record(TrialStatus.CRASHED)).root_rank == 0


def test_the_logs_come_first_in_the_evidence(tmp_path):
    logs = [("x/attempt_0/1/stderr.log", f"step 3\n{OOM}\n")]
    make_trial(tmp_path, [(1, OOM, 100.0)], logs)
    verdict = explain_trial(tmp_path, record(TrialStatus.OOM))
    assert verdict.evidence[0].file.endswith("1/stderr.log")
    assert verdict.evidence[0].line == 2
    assert verdict.root_rank == 1


def test_an_unknown_error_is_named_with_its_rank_and_phase(tmp_path):
    make_trial(tmp_path, [(0, CLOSED, 100.5), (1, "ValueError: odd", 100.0)])
    verdict = explain_trial(tmp_path, record(TrialStatus.CRASHED))
    assert (verdict.failure_class, verdict.root_rank) == ("unknown", 1)
    assert "ValueError: odd" in verdict.cause
    assert verdict.phase == "backward"


def test_a_silent_kill_takes_its_phase_from_the_heartbeat(tmp_path):
    summary = (
        "Root Cause (first observed failure):\n[0]:\n  time      : 2026-11-30_03:19:20\n"
        "  host      : localhost\n  rank      : 1 (local_rank: 1)\n"
        "  exitcode  : -9 (pid: 11275)\n  error_file: <N/A>\n"
        "  traceback : Signal 9 (SIGKILL) received by PID 11275\n"
    )
    logs = [("launcher.log", summary), ("x/attempt_0/0/stderr.log", CLOSED)]
    folder = make_trial(tmp_path, [(0, CLOSED, 100.0)], logs)
    folder.beat(1, "optimizer", 7)
    verdict = explain_trial(tmp_path, record(TrialStatus.CRASHED))
    assert (verdict.failure_class, verdict.root_rank) == ("rank_death", 1)
    assert verdict.phase == "optimizer"


def test_the_kernels_count_of_kills_makes_it_host_memory(tmp_path):
    make_trial(tmp_path, logs=[("launcher.log", "died with <Signals.SIGKILL: 9>\n")])
    reason = "rank 0 was killed by the kernel for want of memory"
    verdict = explain_trial(tmp_path, record(TrialStatus.HOST_OOM, reason=reason))
    assert (verdict.failure_class, verdict.cause) == ("host_oom", reason)


def test_hang_and_timeout_use_the_heartbeats(tmp_path):
    folder = make_trial(tmp_path)
    folder.beat(0, "step", 5)
    folder.beat(1, "step", 3)
    assert explain_trial(tmp_path, record(TrialStatus.HANG)).root_rank == 1
    assert explain_trial(tmp_path, record(TrialStatus.TIMEOUT)).failure_class == "performance"


@pytest.mark.parametrize(
    ("reason", "failure_class"),
    [
        ("backend=d2c1t3: dp * cp * tp = 6 must equal world_size = 2", "mesh"),
        ("fsdp.per_layer_optim_step=True: is not available yet", "other"),
    ],
)
def test_refused_points_say_why(tmp_path, reason, failure_class):
    verdict = explain_trial(tmp_path, record(TrialStatus.INVALID, reason=reason))
    assert verdict.failure_class == failure_class
    assert reason in verdict.cause


def test_a_damaged_error_file_is_skipped(tmp_path):
    make_trial(tmp_path, [(1, OOM, 100.0)])
    (tmp_path / "errors" / "rank0.json").write_text('{"rank": 0, "trace')
    (tmp_path / "errors" / "rank2.json").write_text("[]")
    assert explain_trial(tmp_path, record(TrialStatus.OOM)).root_rank == 1


def test_runner_callback(tmp_path):
    make_trial(tmp_path, [(1, OOM, 100.0)])
    assert explain_run_for_record(tmp_path, record(TrialStatus.OOM)).failure_class == "cuda_oom"


def test_a_run_reports_its_first_failure_and_all_trials(tmp_path):
    run = RunFolder(tmp_path)
    make_trial(run.trial("good").path, logs=[("launcher.log", "step 1 loss 2\n")])
    make_trial(run.trial("bad").path, [(1, OOM, 100.0)])
    records = [
        Record(id="good", status=TrialStatus.OK),
        Record(id="odd", status=TrialStatus.INVALID, reason="backend=d3: no"),
        Record(id="bad", status=TrialStatus.OOM),
    ]
    run.results_path.write_text("".join(encode(item) + "\n" for item in records) + '{"torn')
    verdict, trials = explain_run(tmp_path)
    assert verdict.failure_class == "cuda_oom"
    assert [trial.id for trial in trials] == ["good", "odd", "bad"]
    assert explain_sources([str(run.trial("bad").path)], None)[0].failure_class == "cuda_oom"


def test_a_run_without_failures_is_healthy(tmp_path):
    run = RunFolder(tmp_path)
    run.results_path.write_text(encode(Record(id="good", status=TrialStatus.OK)) + "\n")
    assert explain_run(tmp_path)[0].failure_class == "healthy"
    run.results_path.write_text("")
    assert explain_run(tmp_path)[0].failure_class == "unknown"


def test_folders_are_told_apart(tmp_path):
    run, trial = tmp_path / "run", tmp_path / "run" / "trials" / "abc"
    make_trial(trial)
    assert is_run_folder(run)
    assert not is_run_folder(trial)
    assert is_trial_folder(trial)
    assert not is_trial_folder(tmp_path)
