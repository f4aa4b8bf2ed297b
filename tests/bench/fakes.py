"""Plans of fake trials (`fake_trial.py`) and the harness that runs them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdpbench.bench.records import TrialSpec
from fsdpbench.bench.runner import Harness
from fsdpbench.bench.space import SweepSpace
from fsdpbench.bench.sweep import Point, SweepPlan, compute_id
from fsdpbench.bench.trial import Command
from fsdpbench.errors import Violation

SCRIPT = Path(__file__).with_name("fake_trial.py")


class Notes:
    """An observer that remembers what it was told."""

    def __init__(self):
        self.events = []

    def start_sweep(self, num_trials, num_kept):
        self.events.append(("sweep", num_trials, num_kept))

    def start_trial(self, spec):
        self.events.append(("start", spec.id))

    def show_beat(self, spec, beats):
        self.events.append(("beat", spec.id, [beat.phase for beat in beats]))

    def finish_trial(self, record):
        self.events.append(("finish", record.id, record.status.value))

    def finish_sweep(self):
        self.events.append(("end",))


def make_spec(axes: Mapping[str, Any] | None = None, **fields: Any) -> TrialSpec:
    axes = dict(axes or {})
    trial_id = compute_id(axes, {}, 1, "cpu", None)
    limits = {"timeout_seconds": 60.0, "hang_seconds": 30.0}
    return TrialSpec(id=trial_id, axes=axes, config={"path": "fake"}, **{**limits, **fields})


def make_plan(points: Sequence[Mapping[str, Any]], **fields: Any) -> SweepPlan:
    """Make a plan of fake trials; a point with `invalid` is one with a violation."""
    made = []
    for axes in points:
        spec = None if "invalid" in axes else make_spec(axes, **fields)
        violations = (Violation("backend", "'x'", axes["invalid"]),) if "invalid" in axes else ()
        point_id = compute_id(axes, {}, 1, "cpu", None)
        made.append(Point(point_id, axes, {"path": "fake"}, {}, spec, violations))
    return SweepPlan(SweepSpace(), "cpu", 1, "fake", tuple(made))


def fake_command(spec: TrialSpec, folder: Any) -> Command:
    argv = [sys.executable, "-I", "-S", str(SCRIPT), str(folder.path.resolve())]
    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return Command(argv, env)


def make_harness(**fields: Any) -> Harness:
    return Harness(**{"build_command": fake_command, "observer": Notes(), **fields})


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def wait_until(condition, seconds: float = 20.0) -> bool:
    """Poll a condition; returns whether it came true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return False
