"""Shows a running sweep: a line for each finished trial, and on a terminal a live one with the ETA.

Where output is no terminal (CI logs), or one that cannot move its cursor, only whole lines are
written.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from fsdpbench.bench.folders import Heartbeat
from fsdpbench.bench.plain_text import clean_text
from fsdpbench.bench.records import Record, TrialSpec, TrialStatus
from fsdpbench.units import format_rate, format_seconds

STYLES = {TrialStatus.OK: "green", TrialStatus.INVALID: "yellow", TrialStatus.PRUNED: "yellow"}


class ProgressDisplay:
    """Observer of the runner that writes to one console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_animated = console.is_terminal and not console.is_dumb_terminal
        self._durations: list[float] = []
        self._num_trials = 0
        self._num_started = 0
        self._started = time.monotonic()
        self._live = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[eta]}", markup=False),
            console=console,
            transient=True,
            disable=not self._is_animated,
        )
        self._task: TaskID | None = None

    def start_sweep(self, num_trials: int, num_kept: int) -> None:
        """Say how much there is to do."""
        self._num_trials = num_trials
        kept = f", {num_kept} kept from before" if num_kept else ""
        self._print(Text(f"{num_trials} trials to run{kept}"))
        self._live.start()
        self._task = self._live.add_task("", total=num_trials, eta="")

    def start_trial(self, spec: TrialSpec) -> None:
        """Name the trial on the live line."""
        self._num_started += 1
        self._started = time.monotonic()
        self._update(spec, "starting")

    def show_beat(self, spec: TrialSpec, beats: Sequence[Heartbeat]) -> None:
        """Show what the latest rank said."""
        latest = max(beats, key=lambda beat: beat.unix_seconds, default=None)
        if latest is None or latest.phase is None:
            return
        step = "" if latest.step is None else f" {latest.step}"
        self._update(spec, f"{latest.phase}{step}")

    def finish_trial(self, record: Record) -> None:
        """Write the trial's line."""
        if record.duration_seconds is not None:
            self._durations.append(record.duration_seconds)
        self._print(self._describe(record))
        if self._task is not None and record.status is not TrialStatus.INVALID:
            self._live.advance(self._task)

    def finish_sweep(self) -> None:
        """Take the live line away."""
        self._live.stop()

    def _update(self, spec: TrialSpec, doing: str) -> None:
        if self._task is not None:
            text = clean_text(f"{describe_axes(spec.axes)}: {doing}")
            self._live.update(self._task, description=text, eta=self._describe_eta())

    def _describe_eta(self) -> str:
        waiting = self._num_trials - self._num_started
        seconds = estimate_seconds(self._durations, waiting, time.monotonic() - self._started)
        return "" if seconds is None else f"about {format_seconds(seconds)} left"

    def _describe(self, record: Record) -> Text:
        place = "" if record.status is TrialStatus.INVALID else f"[{self._num_started}"
        place += f"/{self._num_trials}] " if place else ""
        line = Text(place)
        line.append(f"{record.status.value:8}", style=STYLES.get(record.status, "red"))
        line.append(f" {clean_text(describe_axes(record.axes))}")
        if record.status is TrialStatus.OK:
            line.append(f"  {describe_result(record)}")
        elif record.reason:
            first = next(iter(clean_text(record.reason).splitlines()), "")
            line.append(f"  {first}", style="dim")
        if record.duration_seconds is not None:
            line.append(f"  ({format_seconds(record.duration_seconds)})", style="dim")
            left = estimate_seconds(self._durations, self._num_trials - self._num_started, None)
            if left and not self._is_animated:
                line.append(f"  about {format_seconds(left)} left", style="dim")
        return line

    def _print(self, line: Text) -> None:
        self._console.print(line, soft_wrap=True)


def describe_result(record: Record) -> str:
    """Write a measured trial's main figures."""
    parts = []
    if record.tokens_per_second is not None or record.sync is None:
        parts.append(f"{format_rate(record.tokens_per_second)} tokens/s")
    if record.sync is not None:
        parts.append(f"weight updates pause {format_seconds(record.sync.pause_seconds)}")
    return ", ".join(parts)


def describe_axes(axes: Mapping[str, Any]) -> str:
    """Write axis values on one line: `parallel=fsdp:d2 gradient_checkpointing=true`."""
    return " ".join(f"{name}={_write(value)}" for name, value in axes.items()) or "base"


def _write(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)


def estimate_seconds(
    durations: Sequence[float], num_waiting: int, running_seconds: float | None
) -> float | None:
    """Estimate the time left from the finished trials' mean; None before the first has finished.

    `running_seconds` is how long the running trial has been running, None if none is.
    """
    if not durations:
        return None
    mean = statistics.fmean(durations)
    rest = 0.0 if running_seconds is None else max(0.0, mean - running_seconds)
    return num_waiting * mean + rest
