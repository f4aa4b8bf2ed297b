import os
import signal
import subprocess
import sys

from fsdpbench.bench.processes import (
    catches_signal,
    kill_marked,
    list_descendants,
    list_marked,
    read_parent_and_state,
)
from tests.bench.fakes import is_alive, wait_until


def test_descendants_are_found_through_new_sessions():
    code = (
        "import subprocess as s, time;"
        "s.Popen(['sleep', '600'], start_new_session=True); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        assert wait_until(lambda: len(list_descendants(child.pid)) == 1)
        (grandchild,) = list_descendants(child.pid)
        assert child.pid in list_descendants(os.getpid())
        assert grandchild in list_descendants(os.getpid())
    finally:
        os.kill(grandchild, signal.SIGKILL)
        child.kill()
        child.wait()
    assert list_descendants(child.pid) == []


def test_a_zombie_is_not_living():
    child = subprocess.Popen(["true"])
    assert wait_until(lambda: read_parent_and_state(child.pid) == (os.getpid(), "Z"))
    assert child.pid not in list_descendants(os.getpid())
    child.wait()
    assert read_parent_and_state(child.pid) is None


def test_marked_processes_are_killed_and_no_others():
    marked = [
        subprocess.Popen(["sleep", "600"], env={"FSDPBENCH_TRIAL": mark})
        for mark in ("/run/a", "/run/a/trials/x")
    ]
    others = [
        subprocess.Popen(["sleep", "600"], env=env)
        for env in ({"FSDPBENCH_TRIAL": "/run/ab"}, {"OTHER": "/run/a"}, {})
    ]
    try:
        assert set(list_marked("/run/a")) == {process.pid for process in marked}
        assert kill_marked("/run/a", 0.0) == 0, "no time, nothing done"
        assert kill_marked("/run/a", 0.2) == 2
        assert [process.wait(5) for process in marked] == [-signal.SIGKILL] * 2
        assert all(is_alive(process.pid) for process in others)
    finally:
        for process in (*marked, *others):
            process.kill()
            process.wait()


def test_a_handler_of_its_own_is_seen():
    code = "import signal; signal.signal(signal.SIGUSR1, print); print('set', flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    with child:
        child.stdout.readline()
        assert catches_signal(child.pid, signal.SIGUSR1)
        assert not catches_signal(child.pid, signal.SIGUSR2)
        child.communicate(b"\n")
    assert not catches_signal(child.pid, signal.SIGUSR1)
