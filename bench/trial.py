"""Runs one trial as processes: starts its supervisor, watches the heartbeats, ends it when it must.

It knows a command line, a folder and limits; what the trial measures and how its end is to be
called is decided elsewhere (`worker`, `classify`).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fsdpbench.bench.folders import Heartbeat, TrialFolder
from fsdpbench.bench.json_text import parse_object
from fsdpbench.bench.processes import TRIAL_MARK, catches_signal, kill_marked, list_descendants
from fsdpbench.bench.records import TrialSpec
from fsdpbench.bench.watchdog import Watchdog

POLL_SECONDS = 0.1
WATCH_SECONDS = 0.5  # heartbeats are read this often; it bounds the cost of watching
STACKS_SECONDS = 1.0  # time that hanging ranks get to write their stacks before they are killed

EndedBy = Literal["itself", "timeout", "hang", "stop"]


@dataclass(frozen=True)
class Command:
    """What starts a trial: an argument list and the whole environment of its processes."""

    argv: Sequence[str]
    env: Mapping[str, str]


@dataclass(frozen=True)
class TrialEnd:
    """How the processes of a trial ended."""

    ended_by: EndedBy
    exit_code: int | None  # of the command; negative: minus the signal; None: killed or unknown
    seconds: float
    strays: int = 0  # processes that outlived the command and were killed
    stuck: list[int] = field(default_factory=list)  # processes that could not be killed
    num_oom_kills: int = 0  # processes the kernel killed for memory meanwhile, on this machine


@dataclass(frozen=True)
class Watch:
    """What the runner wants to know and to say while a trial runs."""

    stop: Callable[[], bool] = lambda: False
    """Asked about ten times a second; True ends the trial."""
    on_beat: Callable[[list[Heartbeat]], None] = lambda beats: None
    on_hang: Callable[[Path, list[int]], None] = lambda folder, pids: None
    """Called with the trial's folder and its processes before they are killed."""
    keep_open: tuple[int, ...] = ()
    """Descriptors handed to the supervisor: the run's lock lives as long as the trial does."""


def run_trial(folder: TrialFolder, spec: TrialSpec, command: Command, watch: Watch) -> TrialEnd:
    """Run the command until it ends or is ended; on return none of its processes is left."""
    started = time.monotonic()
    oom_kills = count_oom_kills()
    mark = str(folder.path.resolve())
    with folder.launcher_log.open("ab") as log:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "fsdpbench.bench.supervisor", "--", *command.argv],
            env={**command.env, TRIAL_MARK: mark},
            cwd=folder.path,  # nothing of the user's folder can shadow a module
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            pass_fds=watch.keep_open,
        )
    with supervisor:
        ended_by = _watch(supervisor, folder, spec, watch, started)
        if supervisor.stdin is not None:
            supervisor.stdin.close()  # tells the supervisor to kill whatever is left
        report = supervisor.stdout.read() if supervisor.stdout is not None else b""
        supervisor.wait()
    said = _read_report(report)
    if said is None:  # the supervisor was killed: its trial has lost its keeper
        said = {"exit_code": None, "strays": kill_marked(mark), "stuck": []}
    return TrialEnd(
        ended_by=ended_by,
        exit_code=said["exit_code"],
        seconds=time.monotonic() - started,
        strays=said["strays"],
        stuck=said["stuck"],
        num_oom_kills=count_oom_kills() - oom_kills,
    )


def _watch(
    supervisor: subprocess.Popen[bytes],
    folder: TrialFolder,
    spec: TrialSpec,
    watch: Watch,
    started: float,
) -> EndedBy:
    watchdog = Watchdog(started, spec.timeout_seconds, spec.hang_seconds)
    next_look = started
    poller = select.poll()
    if supervisor.stdout is not None:
        poller.register(supervisor.stdout.fileno(), select.POLLIN | select.POLLHUP)
    while not poller.poll(POLL_SECONDS * 1000):  # readable: its report, or its death
        if watch.stop():
            return "stop"
        now = time.monotonic()
        if now < next_look:
            continue
        next_look = now + WATCH_SECONDS
        beats = folder.read_heartbeats()
        overrun = watchdog.judge(now, tuple((beat.rank, beat.unix_seconds) for beat in beats))
        if overrun is not None:
            if overrun == "hang":
                pids = list_descendants(supervisor.pid)
                _ask_for_stacks(pids)
                watch.on_hang(folder.path, pids)
            return overrun
        watch.on_beat(beats)
    return "itself"


def _ask_for_stacks(pids: Sequence[int]) -> None:
    """Send SIGUSR1 to those that handle it (workers register faulthandler for it)."""
    asked = [pid for pid in pids if catches_signal(pid, signal.SIGUSR1)]
    for pid in asked:
        try:
            os.kill(pid, signal.SIGUSR1)
        except ProcessLookupError:
            continue
    if asked:
        time.sleep(STACKS_SECONDS)


def _read_report(text: bytes) -> dict[str, Any] | None:
    try:
        return parse_object(text)
    except ValueError:
        return None


def count_oom_kills() -> int:
    """Return how many processes this machine's kernel has killed for want of memory, if it says."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    for line in lines:
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    return 0
