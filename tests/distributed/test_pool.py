"""The pool: right sums, reused workers, errors with tracebacks, recovery after a death."""

from __future__ import annotations

import os
import signal

import pytest

from tests.distributed.pool import list_deaths, run_on_ranks

CHECKS = "tests.distributed.payloads.pool_checks"


def test_workers_are_reused_over_world_sizes():
    two = run_on_ranks(f"{CHECKS}:sum_ranks", 2, offset=10)
    three = run_on_ranks(f"{CHECKS}:sum_ranks", 3)
    assert [value for value, _ in two] == [21, 21]
    assert [value for value, _ in three] == [3, 3, 3]
    assert [pid for _, pid in two] == [pid for _, pid in three][:2]


def test_an_error_names_the_rank_and_the_next_call_works():
    with pytest.raises(AssertionError, match=r"rank 1: .*planned failure"):
        run_on_ranks(f"{CHECKS}:fail_on", 2, failing_rank=1)
    assert run_on_ranks(f"{CHECKS}:sum_ranks", 2)[0][0] == 1


def test_a_death_is_reported():
    with pytest.raises(AssertionError, match="the worker process died"):
        run_on_ranks(f"{CHECKS}:die", 2)


def test_a_hang_ends_at_the_time_limit():
    standing = r"(?s)no answer from \[0, 1\].*rank 1: .*in sleep"
    with pytest.raises(AssertionError, match=standing):
        run_on_ranks(f"{CHECKS}:sleep", 2, seconds=60, timeout_seconds=0.5)


def test_a_worker_that_dies_between_calls_is_replaced_and_told_of():
    before = len(list_deaths())
    pid = run_on_ranks(f"{CHECKS}:sum_ranks", 1)[0][1]
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert run_on_ranks(f"{CHECKS}:sum_ranks", 1)[0][1] != pid
    assert list_deaths()[before:] == [-signal.SIGKILL]
