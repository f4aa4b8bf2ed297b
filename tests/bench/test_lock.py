import os
import subprocess
import sys
import time

import pytest

from fsdpbench.bench.lock import RunLock, RunLocked
from fsdpbench.errors import FsdpbenchError
from tests.bench.fakes import wait_until


def test_a_second_runner_is_refused_at_once_and_told_who(tmp_path):
    path = tmp_path / "run" / "lock"
    with RunLock(path):
        started = time.monotonic()
        with pytest.raises(RunLocked, match=rf"process {os.getpid()}\) runs here"), RunLock(path):
            pass
        assert time.monotonic() - started < 2
    with RunLock(path):
        assert path.read_text() == f"{os.getpid()}\n"


def test_the_supervisor_of_a_dead_runner_is_waited_for(tmp_path):
    path = tmp_path / "lock"
    holder = RunLock(path)
    holder.__enter__()
    # the child has the descriptor as a supervisor has it; the file names a process that is gone
    child = subprocess.Popen(["sleep", "0.6"], pass_fds=(holder.descriptor,))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    path.write_text(f"{gone.pid}\n")
    os.close(holder.descriptor)
    started = time.monotonic()
    with RunLock(path, patience_seconds=20):
        assert time.monotonic() - started > 0.2
        assert wait_until(lambda: child.poll() is not None, 5)


def test_a_lock_held_by_an_unknown_process_is_refused_after_patience(tmp_path):
    path = tmp_path / "lock"
    with RunLock(path):
        path.write_text("")
        with pytest.raises(RunLocked, match="process unknown"), RunLock(path, patience_seconds=0.1):
            pass


def test_a_place_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FsdpbenchError, match="cannot be written"), RunLock(tmp_path / "file/lock"):
        pass
