import pytest

from fsdpbench.bench.classify import classify_end
from fsdpbench.bench.folders import RunFolder
from fsdpbench.bench.records import WorkerOutcome
from fsdpbench.bench.trial import TrialEnd
from tests.bench.fakes import make_spec

# what torchrun prints at the end of a failed run, shortened
TORCHRUN = """\
E1130 03:00:00.000 1 torch/distributed/elastic/multiprocessing/api.py:900] failed (exitcode: {code})
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
fsdpbench.bench.worker FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-30_03:00:01
  rank      : 0 (local_rank: 0)
  exitcode  : -6 (pid: 11)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_03:00:00
  host      : machine
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 12)
  error_file: <N/A>
============================================================
"""


def classify(tmp_path, logs=None, outcome=None, beats=(), **end):
    spec = make_spec(hang_seconds=20.0, timeout_seconds=90.0)
    folder = RunFolder(tmp_path).trial(spec.id)
    folder.create(spec)
    for name, text in (logs or {}).items():
        path = folder.logs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for beat in beats:
        folder.beat(*beat)
    end = TrialEnd(**{"ended_by": "itself", "exit_code": 1, "seconds": 1.0, **end})
    ending = classify_end(spec, end, outcome, folder)
    return ending.status.value, ending.reason


def test_a_good_end(tmp_path):
    assert classify(tmp_path, outcome=WorkerOutcome(), exit_code=0) == ("ok", None)


@pytest.mark.parametrize("status", ["oom", "host_oom", "crashed"])
def test_the_workers_own_word_counts(tmp_path, status):
    outcome = WorkerOutcome(status=status, error="rank 1, forward: it broke")
    assert classify(tmp_path, outcome=outcome) == (status, "rank 1, forward: it broke")


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        (
            "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB",
            "oom",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB",
        ),
        (
            "RuntimeError: CUDA error: out of memory",
            "oom",
            "RuntimeError: CUDA error: out of memory",
        ),
        ("MemoryError", "host_oom", "MemoryError"),
        (
            "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried",
            "host_oom",
            "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried",
        ),
        ("KeyError: 'x'\nValueError: y", "crashed", "rank 1 ended with exit code 1: ValueError: y"),
        ("all is well", "crashed", "rank 1 ended with exit code 1"),
        ("the MemoryError class", "crashed", "rank 1 ended with exit code 1"),
    ],
)
def test_without_an_outcome_the_logs_speak(tmp_path, text, status, reason):
    logs = {
        "launcher.log": TORCHRUN.format(code=1),
        "x/attempt_0/0/stderr.log": "RuntimeError: Connection closed by peer\n",
        "x/attempt_0/1/stderr.log": f"Traceback (most recent call last):\n{text}\n",
    }
    assert classify(tmp_path, logs) == (status, reason)


def test_a_sigkill_is_host_memory_only_if_the_kernel_says_so(tmp_path):
    logs = {"launcher.log": TORCHRUN.format(code=-9)}
    assert classify(tmp_path, logs) == ("crashed", "rank 1 died of SIGKILL")
    killed = ("host_oom", "rank 1 was killed by the kernel for want of memory")
    assert classify(tmp_path, logs, num_oom_kills=1) == killed
    aborted = {"launcher.log": TORCHRUN.format(code=-6)}
    assert classify(tmp_path, aborted, num_oom_kills=1)[0] == "crashed"


def test_what_the_runner_did_comes_before_what_was_said(tmp_path):
    crashed = WorkerOutcome(status="crashed", error="terminated")
    timed_out = ("timeout", "still running after its limit of 1 min 30 s")
    assert classify(tmp_path, outcome=crashed, ended_by="timeout") == timed_out
    status, reason = classify(tmp_path, outcome=crashed, ended_by="hang")
    assert (status, reason) == ("hang", "no heartbeat in the first 20.0 s")


def test_a_hang_names_the_rank_that_fell_silent_first(tmp_path):
    beats = [(1, "backward", 4), (0, "clip", 4)]
    status, reason = classify(tmp_path, beats=beats, ended_by="hang", exit_code=None)
    assert status == "hang"
    assert reason == "no heartbeat for 20.0 s; rank 1 fell silent first, in backward, step 4"


def test_odd_ends_have_words(tmp_path):
    measured = WorkerOutcome()
    assert classify(tmp_path, exit_code=None)[1] == "the trial was killed from outside"
    assert classify(tmp_path, exit_code=0)[1] == "the trial ended without writing an outcome"
    late = ("crashed", "the trial died of SIGSEGV after it had measured")
    assert classify(tmp_path, outcome=measured, exit_code=-11) == late
    assert classify(tmp_path, exit_code=-99)[1] == "the trial died of signal 99"


def test_only_the_end_of_a_huge_log_is_read(tmp_path):
    text = "ValueError: early\n" + "x" * (1 << 20) + "\nValueError: late\n\xff"
    assert classify(tmp_path, {"0/stderr.log": text})[1].endswith("ValueError: late")
