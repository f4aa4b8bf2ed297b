import json
import os
import signal
import subprocess
import sys

import pytest

from tests.bench.fakes import is_alive, wait_until

MAKE_ORPHAN = (
    "import subprocess as s;"
    "print(s.Popen(['sleep', '600'], start_new_session=True, stdout=s.DEVNULL).pid, flush=True)"
)


def supervise(*command):
    return subprocess.Popen(
        [sys.executable, "-m", "fsdpbench.bench.supervisor", "--", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def end_of(supervisor):
    out, err = supervisor.communicate(timeout=30)
    assert supervisor.returncode == 0
    return json.loads(out), err.decode()


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [("pass", 0), ("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9)],
)
def test_the_exit_code_is_reported(code, exit_code):
    supervisor = supervise(sys.executable, "-c", code)
    with supervisor:
        said = json.loads(supervisor.stdout.read())
    assert said == {"exit_code": exit_code, "strays": 0, "stuck": []}
    assert supervisor.returncode == 0


def test_orphans_in_sessions_of_their_own_are_killed_when_the_command_ends():
    supervisor = supervise(sys.executable, "-c", MAKE_ORPHAN)
    with supervisor:
        said = json.loads(supervisor.stdout.read())
        orphan = int(supervisor.stderr.read())
    assert said["strays"] == 1
    assert not is_alive(orphan)


def start_family():
    """Start a command with an orphan; return supervisor, command and orphan."""
    code = f"import os, time\nprint(os.getpid(), flush=True)\n{MAKE_ORPHAN}\ntime.sleep(600)"
    supervisor = supervise(sys.executable, "-c", code)
    command = int(supervisor.stderr.readline())
    orphan = int(supervisor.stderr.readline())
    return supervisor, command, orphan


@pytest.mark.parametrize("how", ["closed", "terminated"])
def test_everything_is_killed_when_the_runner_lets_go(how):
    supervisor, command, orphan = start_family()
    with supervisor:
        if how == "closed":
            supervisor.stdin.close()
        else:
            supervisor.terminate()
        said = json.loads(supervisor.stdout.read())
    assert said["exit_code"] == -signal.SIGKILL
    assert not is_alive(command)
    assert not is_alive(orphan)
    assert supervisor.returncode == 0


def test_the_terminals_signals_do_not_end_it():
    supervisor, command, orphan = start_family()
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(supervisor.pid, number)
    with pytest.raises(subprocess.TimeoutExpired):
        supervisor.wait(0.3)
    assert is_alive(command)
    said, _ = end_of(supervisor)
    assert said["exit_code"] == -signal.SIGKILL
    assert wait_until(lambda: not is_alive(orphan), 5)


def test_a_command_that_cannot_start_says_so():
    supervisor = supervise("/no/such/program")
    said, err = end_of(supervisor)
    assert said["exit_code"] == 127
    assert "cannot start /no/such/program" in err
