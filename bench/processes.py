"""Finding and ending processes of our own: by descent, or by a mark in their environment.

Never by name. Linux only (/proc, pidfd); standard library only, since the supervisor imports it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections import defaultdict
from pathlib import Path

TRIAL_MARK = "FSDPBENCH_TRIAL"
"""Environment variable of every process of a trial: the absolute path of the trial's folder."""

_PR_SET_CHILD_SUBREAPER = 36
PROC = Path("/proc")


def become_subreaper() -> None:
    """Let orphaned descendants become children of this process instead of init's."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def read_parent_and_state(pid: int) -> tuple[int, str] | None:
    """Return (parent's pid, state letter) of a process, None if it is gone."""
    try:
        stat = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    state, parent = stat.rpartition(")")[2].split()[:2]  # the name before ")" may hold anything
    return int(parent), state


def list_pids() -> list[int]:
    """Return the ids of all visible processes."""
    return [int(name) for name in os.listdir(PROC) if name.isdigit()]  # noqa: PTH208 - Path objects cost more here


def list_descendants(root: int) -> list[int]:
    """Return the living (not zombie) processes below `root`, parents before children."""
    children: dict[int, list[int]] = defaultdict(list)
    states: dict[int, str] = {}
    for pid in list_pids():
        found = read_parent_and_state(pid)
        if found is not None:
            children[found[0]].append(pid)
            states[pid] = found[1]
    ordered: list[int] = []
    queue = list(children[root])
    while queue:
        pid = queue.pop(0)
        ordered.append(pid)
        queue.extend(children[pid])
    return [pid for pid in ordered if states[pid] not in "ZX"]


def reap_children() -> dict[int, int]:
    """Collect the exit statuses of all children that have ended: pid -> wait status."""
    statuses: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return statuses
        if pid == 0:
            return statuses
        statuses[pid] = status


def kill_descendants(limit_seconds: float = 30.0) -> tuple[dict[int, int], list[int]]:
    """Kill and reap everything below this process, which must be a subreaper.

    Returns the statuses collected, and the processes that outlived the limit (in the kernel's
    uninterruptible sleep). New children of dying parents are caught: it repeats until none is left.
    """
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + limit_seconds
    while True:
        living = list_descendants(os.getpid())
        for pid in living:
            # a descendant of ours cannot have been replaced by a stranger: nobody else reaps it
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        statuses.update(reap_children())
        if not living or time.monotonic() > deadline:
            return statuses, living
        time.sleep(0.005)


def list_marked(mark: str) -> list[int]:
    """Return the processes whose TRIAL_MARK is `mark` or lies below it."""
    return [pid for pid in list_pids() if pid != os.getpid() and _carries(pid, mark)]


def kill_marked(mark: str, limit_seconds: float = 10.0) -> int:
    """Kill the processes that carry `mark`, and wait until they are gone; return how many."""
    killed: set[int] = set()
    deadline = time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        living = list_marked(mark)
        if not living:
            break
        for pid in living:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            try:
                if _carries(pid, mark):  # asked again under the pidfd: the number was not reused
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    killed.add(pid)
            except ProcessLookupError:
                pass
            finally:
                os.close(descriptor)
        time.sleep(0.02)
    return len(killed)


def _carries(pid: int, mark: str) -> bool:
    try:
        environment = (PROC / str(pid) / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    prefix = f"{TRIAL_MARK}=".encode()
    for entry in environment.split(b"\0"):
        if entry.startswith(prefix):
            value = os.fsdecode(entry[len(prefix) :])
            return value == mark or value.startswith(mark + os.sep)
    return False


def catches_signal(pid: int, number: int) -> bool:
    """Say whether a process has a handler of its own for a signal."""
    try:
        status = (PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    for line in status.splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
