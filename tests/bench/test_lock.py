import os
import socket
import subprocess
import sys
import time

import pytest

from fsdpbench.bench.lock import RunLock, RunLocked
from fsdpbench.bench.stop import Interrupted
from fsdpbench.errors import FsdpbenchError
from tests.bench.fakes import wait_until


def test_a_second_runner_is_refused_at_once_and_told_who(tmp_path):
    path = tmp_path / "run" / "lock"
    with RunLock(path):
        started = time.monotonic()
        with (
            pytest.raises(RunLocked, match=rf"process {os.getpid()} on \S+\) runs here"),
            RunLock(path),
        ):
            pass
        assert time.monotonic() - started < 2
    with RunLock(path):
        assert path.read_text() == f"{os.getpid()} {socket.gethostname()}\n"


def test_the_supervisor_of_a_dead_runner_is_waited_for(tmp_path):
    path = tmp_path / "lock"
    holder = RunLock(path)
    holder.__enter__()
    # the child has the descriptor as a supervisor has it; the file names a process that is gone
    child = subprocess.Popen(["sleep", "0.6"], pass_fds=(holder.descriptor,))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    path.write_text(f"{gone.pid} {socket.gethostname()}\n")
    os.close(holder.descriptor)
    started = time.monotonic()
    with RunLock(path, patience_seconds=20):
        assert time.monotonic() - started > 0.2
        assert wait_until(lambda: child.poll() is not None, 5)


def test_a_file_of_a_dead_process_locks_nothing(tmp_path):
    path = tmp_path / "lock"
    path.write_text(f"{os.getpid()} {socket.gethostname()}\n")  # a number may be reused
    with RunLock(path):
        pass
    path.write_bytes(b"\xff\xb2" * 9000)
    with RunLock(path, patience_seconds=0.1):
        pass


def test_a_holder_on_another_host_is_named_and_believed(tmp_path):
    path = tmp_path / "lock"
    with RunLock(path):
        path.write_text("4194304 node-7\n")  # no process here; there it may live
        with pytest.raises(RunLocked, match="process 4194304 on node-7"), RunLock(path):
            pass


@pytest.mark.parametrize("text", ["", "x", "12", "1" * 5000, "\u00b2 h", "9" * 300 + " {host}"])
def test_a_damaged_file_hides_who_holds_the_lock(tmp_path, text):
    path = tmp_path / "lock"
    with RunLock(path):
        path.write_text(text.format(host=socket.gethostname()))
        with pytest.raises(RunLocked, match="runs here"), RunLock(path, patience_seconds=0.0):
            pass


def test_the_users_stop_ends_the_wait(tmp_path):
    path = tmp_path / "lock"
    with RunLock(path):
        path.write_text("")
        with pytest.raises(Interrupted), RunLock(path, patience_seconds=30, stop=lambda: True):
            pass


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
