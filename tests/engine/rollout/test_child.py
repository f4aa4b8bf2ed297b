"""Calls to a child process: answers, errors, deadlines, and every way the child can end."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from fsdpbench.engine.rollout.child import ChildProcess, describe_end, inherited_environment
from fsdpbench.engine.rollout.local import build_error
from fsdpbench.errors import WeightSyncError, WorkerError

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 30.0


def wait_until_gone(process: int) -> None:
    deadline = time.monotonic() + PATIENCE
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            os.sched_yield()


@pytest.fixture
def child():
    one = ChildProcess(
        "tests.engine.rollout.echo_child",
        "echo",
        error_of=build_error,
        environment={"PYTHONPATH": str(ROOT)},
    )
    yield one
    one.close()
    assert not psutil.pid_exists(one.pid)


def test_answers_come_to_their_calls_from_any_thread(child):
    results = {}

    def call(value):
        results[value] = child.call("echo", PATIENCE, value=value).result(PATIENCE)

    threads = [threading.Thread(target=call, args=(value,)) for value in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert results == {value: value for value in range(8)}
    large = list(range(200_000))
    assert child.call("echo", PATIENCE, value=large).result(PATIENCE) == large


@pytest.fixture
def high_socket_pairs(many_descriptors, monkeypatch):
    """Number the descriptors of socket pairs beyond 1023, as where many are open."""
    plain = socket.socketpair

    def socketpair():
        pair = []
        for one in plain():
            with one:
                pair.append(socket.socket(fileno=fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 1100)))
        return tuple(pair)

    monkeypatch.setattr(socket, "socketpair", socketpair)


def test_a_parent_with_many_descriptors_is_answered(high_socket_pairs, child):
    assert child.call("echo", PATIENCE, value=3).result(PATIENCE) == 3


def test_whatever_ends_the_reading_ends_the_open_calls(child, monkeypatch):
    def fail(message):
        raise MemoryError

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(child, "_settle", fail)
    with pytest.raises(WorkerError, match=r"was not answered: echo .* ended"):
        child.call("echo", PATIENCE, value=3).result(PATIENCE)


def test_errors_late_answers_and_death(child):
    with pytest.raises(WeightSyncError, match="as told"):
        child.call("fail", PATIENCE).result(PATIENCE)
    with pytest.raises(WorkerError, match=r"echo .* did not answer hang within 0\.1 s"):
        child.call("hang", 0.1).result(PATIENCE)
    assert child.call("echo", PATIENCE, value=1).result(PATIENCE) == 1  # a late call is no death
    open_call = child.call("hang", PATIENCE)
    child.call("die", PATIENCE, code=3)
    with pytest.raises(WorkerError, match=r"hang was not answered: .*with code 3.*\nlast words"):
        open_call.result(PATIENCE)
    assert not child.is_alive
    with pytest.raises(WorkerError, match="with code 3"):
        child.call("echo", PATIENCE, value=1).result(PATIENCE)


def test_a_killed_child_says_so(child):
    call = child.call("hang", PATIENCE)
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="by signal SIGKILL"):
        call.result(PATIENCE)


def test_a_child_that_sends_no_frames_is_ended(child):
    with pytest.raises(WorkerError, match="ended"):
        child.call("garble", PATIENCE).result(PATIENCE)


def test_a_child_that_does_not_read_is_ended(child):
    child.call("stop_reading", PATIENCE, value=0).result(PATIENCE)
    with pytest.raises(WorkerError, match=r"SIGKILL|did not answer"):  # whichever is seen first
        child.call("echo", 0.5, value="x" * 4_000_000).result(PATIENCE)
    with pytest.raises(WorkerError, match="SIGKILL"):
        child.call("echo", PATIENCE, value=1).result(PATIENCE)


def test_close_ends_what_the_child_started_and_open_calls(child):
    grandchild = child.call("spawn", PATIENCE).result(PATIENCE)
    call = child.call("hang", PATIENCE)
    child.close()
    with pytest.raises(WorkerError, match="ended with code 0"):
        call.result(PATIENCE)
    wait_until_gone(grandchild)
    child.close()


def test_a_child_does_not_think_it_is_a_rank(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    kept = inherited_environment()
    assert "NCCL_DEBUG" in kept
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & set(
        kept
    )


@pytest.mark.parametrize(
    ("code", "words"), [(0, "with code 0"), (-9, "by signal SIGKILL"), (-11, "by signal SIGSEGV")]
)
def test_ends_in_words(code, words):
    assert describe_end(code) == words
