"""Runs the points of a sweep one after another and keeps a record of each, whatever happens.

A record is on the disk before the next trial starts. The user's stop ends the running trial without
a record and keeps the others; `--resume` skips the points that have one. Nothing here knows torch,
engines or explanations: the trial is a command line, a failure's verdict comes from `on_failure`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from fsdpbench.bench.classify import classify_end
from fsdpbench.bench.environment import Revision
from fsdpbench.bench.folders import Heartbeat, RunFolder, TrialFolder, write_atomically
from fsdpbench.bench.lock import RunLock
from fsdpbench.bench.processes import kill_marked
from fsdpbench.bench.records import (
    SCHEMA_VERSION,
    Record,
    TrialSpec,
    TrialStatus,
    Verdict,
    WorkerOutcome,
)
from fsdpbench.bench.statistics import is_unstable
from fsdpbench.bench.stop import EXIT_INTERRUPTED
from fsdpbench.bench.store import ResultWriter, StoreError, keep_latest, read_records
from fsdpbench.bench.sweep import Point, SweepPlan
from fsdpbench.bench.sync_plan import drop_unused
from fsdpbench.bench.sync_record import steady_pauses
from fsdpbench.bench.trial import Command, TrialEnd, Watch, run_trial
from fsdpbench.errors import FsdpbenchError
from fsdpbench.log import get_logger

logger = get_logger(__name__)

EXIT_OK = 0
EXIT_TRIAL_FAILED = 5

OnFailure = Callable[[Path, Record], Verdict | None]


class Observer(Protocol):
    """Who shows the progress."""

    def start_sweep(self, num_trials: int, num_kept: int) -> None:
        """`num_trials` are to be run, `num_kept` have their records already."""

    def start_trial(self, spec: TrialSpec) -> None:
        """A trial's processes are being started."""

    def show_beat(self, spec: TrialSpec, beats: Sequence[Heartbeat]) -> None:
        """The running trial's ranks have said this last."""

    def finish_trial(self, record: Record) -> None:
        """A record was stored."""

    def finish_sweep(self) -> None:
        """Nothing more will be shown."""


@dataclass(frozen=True)
class Harness:
    """All that the runner is given from outside."""

    build_command: Callable[[TrialSpec, TrialFolder], Command]
    observer: Observer
    stop: Callable[[], bool] = lambda: False
    """True once the user wants to end."""
    on_failure: OnFailure = lambda folder, record: None
    """Explains a failed trial, given its folder and its record without a verdict."""
    on_hang: Callable[[Path, list[int]], None] = lambda folder, pids: None
    """May look at the processes of a hanging trial before they are killed."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    revision: Revision = field(default_factory=Revision)
    argv: Sequence[str] = ()


@dataclass(frozen=True)
class SweepResult:
    """The records of the plan's points, in the plan's order, and whether the user stopped it."""

    records: list[Record]
    interrupted: bool
    problems: list[str]

    @property
    def exit_code(self) -> int:
        """The command's exit code: 130 stopped, 5 a trial failed, else 0."""
        if self.interrupted:
            return EXIT_INTERRUPTED
        failed = any(record.status.is_failure for record in self.records)
        return EXIT_TRIAL_FAILED if failed else EXIT_OK


def run_sweep(plan: SweepPlan, folder: RunFolder, harness: Harness, *, resume: bool) -> SweepResult:
    """Run all points that have no record yet. Raises RunLocked, StoreError, or FsdpbenchError if
    the folder holds results and `resume` is False."""
    with RunLock(folder.lock_path, stop=harness.stop) as lock:
        before = read_records(folder.results_path)
        if before.records and not resume:
            raise FsdpbenchError(
                f"{folder.path}: holds {len(before.records)} results already; "
                "pass --resume to continue them, or another --out"
            )
        kill_marked(str(folder.path.resolve() / "trials"))  # of a runner that died with its keeper
        _save_plan(plan, folder, harness)
        writer = ResultWriter(folder.results_path)
        try:
            interrupted = _run_points(plan, folder, harness, lock, writer, before.records)
        finally:
            writer.close()
            harness.observer.finish_sweep()
        after = {record.id: record for record in read_records(folder.results_path).records}
        records = [after[point.id] for point in plan.points if point.id in after]
        return SweepResult(records, interrupted, before.problems)


def _run_points(
    plan: SweepPlan,
    folder: RunFolder,
    harness: Harness,
    lock: RunLock,
    writer: ResultWriter,
    before: Sequence[Record],
) -> bool:
    """Run what has no record; return True if the user stopped it."""
    kept = {record.id for record in keep_latest(before)}
    todo = [point for point in plan.points if point.id not in kept]
    trials = sum(point.spec is not None for point in todo)
    harness.observer.start_sweep(trials, len(plan.points) - len(todo))
    for point in sorted(todo, key=lambda point: point.spec is not None):  # the invalid ones first
        if harness.stop():
            return True
        if point.spec is None:
            record: Record | None = _record_invalid(plan, point, harness)
        else:
            record = _run_point(plan, point.spec, folder.trial(point.id), harness, lock)
        if record is None:
            return True
        writer.append(record)
        harness.observer.finish_trial(record)
    return False


def _record_invalid(plan: SweepPlan, point: Point, harness: Harness) -> Record:
    return Record(
        id=point.id,
        status=TrialStatus.INVALID,
        axes=dict(point.axes),
        config=dict(point.config),
        workload=dict(point.workload),
        environment=dict(harness.environment),
        commit=harness.revision.commit,
        dirty=harness.revision.dirty,
        started_at=_now(),
        model=str(point.config.get("path", plan.model)),
        device=plan.device,
        reason="\n".join(str(violation) for violation in point.violations),
    )


def _run_point(
    plan: SweepPlan, spec: TrialSpec, folder: TrialFolder, harness: Harness, lock: RunLock
) -> Record | None:
    """Run one trial and return its record, None if the user stopped it."""
    _prepare_folder(folder, spec)
    command = harness.build_command(spec, folder)
    started_at = _now()
    harness.observer.start_trial(spec)
    watch = Watch(
        stop=harness.stop,
        on_beat=lambda beats: harness.observer.show_beat(spec, beats),
        on_hang=harness.on_hang,
        keep_open=(lock.descriptor,),
    )
    try:
        end = run_trial(folder, spec, command, watch)
    finally:
        shutil.rmtree(folder.weights, ignore_errors=True)  # may be as large as the model
    if end.stuck:
        logger.warning("trial %s left processes that cannot be killed: %s", spec.id, end.stuck)
    if end.ended_by == "stop":
        return None
    fields = _gather_fields(spec, command, end, folder, harness)
    record = Record(started_at=started_at, **fields)
    if record.status is TrialStatus.OK:
        return record
    verdict = _explain(harness.on_failure, folder, record)
    return Record(started_at=started_at, **fields, verdict=verdict)


def _gather_fields(
    spec: TrialSpec, command: Command, end: TrialEnd, folder: TrialFolder, harness: Harness
) -> dict[str, Any]:
    """Return the record's fields but for the start and the verdict."""
    found = folder.load_outcome()
    ending = classify_end(spec, end, found, folder)
    outcome = found or WorkerOutcome()
    rate = outcome.tokens_per_second
    samples = outcome.step_seconds or steady_pauses(outcome.sync)
    return {
        **outcome.model_dump(exclude={"status", "error", "environment"}),
        "id": spec.id,
        "status": ending.status,
        "reason": ending.reason,
        "unstable": ending.status is TrialStatus.OK and is_unstable(samples),
        "axes": spec.axes,
        "config": spec.config,
        "workload": drop_unused(spec.workload),
        "environment": {**harness.environment, **outcome.environment},
        "commit": harness.revision.commit,
        "dirty": harness.revision.dirty,
        "duration_seconds": end.seconds,
        "exit_code": end.exit_code,
        "model": str(spec.config.get("path", "")),
        "device": spec.device,
        "world_size": spec.world_size,
        "command": list(command.argv),
        "tokens_per_second_per_gpu": None if rate is None else rate / spec.world_size,
    }


def _prepare_folder(folder: TrialFolder, spec: TrialSpec) -> None:
    """Start from an empty folder: what an interrupted run of the same trial left is removed."""
    try:
        if folder.path.exists():
            shutil.rmtree(folder.path)
        folder.create(spec)
    except OSError as error:
        raise StoreError(
            f"{folder.path}: cannot be written: {error.strerror}. All trials recorded so far are "
            "kept; make room or mend the permissions, then continue with --resume."
        ) from error


def _explain(on_failure: OnFailure, folder: TrialFolder, record: Record) -> Verdict | None:
    """Ask for a verdict. A record without one is better than none, so its own failure is logged."""
    try:
        return on_failure(folder.path, record)
    except (FsdpbenchError, OSError, ValueError, LookupError) as error:
        logger.warning("trial %s: the explainer failed: %s", record.id, error)
        return None


def _save_plan(plan: SweepPlan, folder: RunFolder, harness: Harness) -> None:
    content = {
        "schema_version": SCHEMA_VERSION,
        "created_at": _now(),
        "argv": list(harness.argv),
        "model": plan.model,
        "device": plan.device,
        "world_size": plan.world_size,
        "commit": harness.revision.commit,
        "dirty": harness.revision.dirty,
        "environment": dict(harness.environment),
        "space": plan.space.model_dump(mode="json", exclude_unset=True),
        "points": [{"id": point.id, "axes": dict(point.axes)} for point in plan.points],
    }
    try:
        text = json.dumps(content, indent=1, default=str, allow_nan=False) + "\n"
        write_atomically(folder.sweep_path, text)
    except OSError as error:
        raise StoreError(f"{folder.sweep_path}: cannot be written: {error.strerror}") from error


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
