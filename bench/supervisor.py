"""Stands between the runner and one trial, so that nothing of the trial is ever left behind.

`python -m fsdpbench.bench.supervisor -- COMMAND...`, started in a session of its own. Its standard
input is a pipe that the runner holds: when that closes, by will or because the runner died (SIGKILL
included), every process below this one is killed. Orphans come back here (subreaper), also those
that made sessions of their own, as torchrun's workers do. On standard output goes one JSON line,
once all are gone: {"exit_code", "strays", "stuck"}. Standard library only: it must start quickly.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence

from fsdpbench.bench.processes import (
    become_subreaper,
    kill_descendants,
    list_descendants,
    reap_children,
)

LAUNCHER_FAILED = 127  # exit code reported when the command could not be started


def main(arguments: Sequence[str]) -> int:
    """Run the command after `--` to its end or to the end of standard input."""
    command = list(arguments[arguments.index("--") + 1 :])
    become_subreaper()
    # handlers that do nothing (exec resets them for the command): only the runner, or SIGTERM sent
    # to this process, ends a trial
    wake = _wake_on(signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr)
        _report(LAUNCHER_FAILED, 0, [])
        return 0
    status = _wait(child.pid, wake)
    strays = len(list_descendants(os.getpid())) if status is not None else 0
    statuses, stuck = kill_descendants()
    status = statuses.get(child.pid) if status is None else status
    child.returncode = -1  # it was reaped here; keep Popen from waiting again
    _report(None if status is None else os.waitstatus_to_exitcode(status), strays, stuck)
    return 0


def _wake_on(*numbers: signal.Signals) -> int:
    """Return a descriptor that becomes readable when one of the signals arrives."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    return read_end


def _wait(child: int, wake: int) -> int | None:
    """Return the child's wait status, or None when it must be killed first."""
    poller = select.poll()
    poller.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    poller.register(wake, select.POLLIN)
    while True:
        for descriptor, _ in poller.poll():
            data = os.read(descriptor, 4096)
            if descriptor != wake and not data:
                return None
            if descriptor == wake and signal.SIGTERM in data:
                return None
        statuses = reap_children()
        if child in statuses:
            return statuses[child]


def _report(exit_code: int | None, strays: int, stuck: list[int]) -> None:
    line = json.dumps({"exit_code": exit_code, "strays": strays, "stuck": stuck})
    try:
        print(line, flush=True)
    except BrokenPipeError:  # the runner is gone: nobody needs the report
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main(sys.argv))
