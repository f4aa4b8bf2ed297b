"""What did not run: failures grouped by their cause, and the points that were never started.

The verdicts come with the records; nothing is diagnosed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdpbench.bench.records import Evidence, Record, TrialStatus
from fsdpbench.reports.axes import Axes, name_trial, plan_axes
from fsdpbench.reports.ranking import NOT_STARTED
from fsdpbench.reports.tables import Cell, Column, Row, Table, absent, format_value
from fsdpbench.units import format_seconds

NO_VERDICT = "No verdict was recorded; run `fsdpdiag explain` on the run directory."


@dataclass(frozen=True)
class FailedTrial:
    """One trial of a group: how to name it and where its logs lie."""

    id: str
    label: str
    ended: str  # exit code and duration as one phrase, or ""
    logs: str  # path of its logs within the run directory


@dataclass(frozen=True)
class FailureGroup:
    """Trials that failed alike: same status, failure class and cause."""

    status: str
    failure_class: str
    cause: str
    where: str  # rank and phase of the first trial, or ""
    confidence: str
    rule: str
    reasons: tuple[str, ...]  # what the runner saw, each once
    remedies: tuple[str, ...]
    evidence: tuple[Evidence, ...]  # of the first trial
    trials: tuple[FailedTrial, ...]


def build_failures(records: Sequence[Record]) -> list[FailureGroup]:
    """Group the failed trials; the largest group comes first."""
    axes = plan_axes([record for record in records if record.status not in NOT_STARTED])
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        if record.status.is_failure:
            verdict = record.verdict
            failure_class = verdict.failure_class if verdict else "unknown"
            cause = verdict.cause if verdict else record.reason or NO_VERDICT
            groups.setdefault((record.status.value, failure_class, cause), []).append(record)
    built = [_group(*key, members, axes) for key, members in groups.items()]
    return sorted(built, key=lambda group: -len(group.trials))


def build_not_started(records: Sequence[Record]) -> Table:
    """Build the table of invalid and pruned points, each with why."""
    points = [record for record in records if record.status in NOT_STARTED]
    axes = plan_axes(points)
    notes = []
    if axes.constant:
        same = ", ".join(f"{title}={value}" for title, value in axes.constant)
        notes.append(f"The same at every point: {same}.")
    return Table(
        title="Points not started",
        caption=f"{_count(len(points))} refused before a process was started.",
        columns=(
            *(Column(f"axis:{axis.path}", axis.title, hint=axis.path) for axis in axes.varied),
            Column("status", "status", hint="invalid: breaks a rule; pruned: will not fit."),
            Column("why", "why", hint="The rule that the point breaks."),
        ),
        rows=tuple(_point_row(record, axes) for record in points),
        notes=tuple(notes),
    )


def _point_row(record: Record, axes: Axes) -> Row:
    values = (
        Cell(format_value(record.axes[axis.path]))
        if axis.path in record.axes
        else absent("not set at this point")
        for axis in axes.varied
    )
    why = record.reason or (record.verdict.cause if record.verdict else "")
    last = Cell(why) if why else absent("no reason was recorded")
    return Row(record.id, (*values, Cell(record.status.value, tone="quiet"), last))


def _group(
    status: str, failure_class: str, cause: str, members: Sequence[Record], axes: Axes
) -> FailureGroup:
    verdict = members[0].verdict
    seen = dict.fromkeys(record.reason for record in members if record.reason)
    return FailureGroup(
        status=status,
        failure_class=failure_class,
        cause=cause,
        where=_where(members[0]),
        confidence=f"{verdict.confidence:.0%}" if verdict else "",
        rule=(verdict.rule or "") if verdict else "",
        reasons=tuple(reason for reason in seen if reason != cause),
        remedies=tuple(verdict.remedies) if verdict else (),
        evidence=tuple(verdict.evidence) if verdict else (),
        trials=tuple(_failed_trial(record, axes) for record in members),
    )


def _count(num_points: int) -> str:
    return "1 point was" if num_points == 1 else f"{num_points} points were"


def _where(record: Record) -> str:
    verdict = record.verdict
    if verdict is None:
        return ""
    parts = []
    if verdict.root_rank is not None:
        parts.append(f"rank {verdict.root_rank}")
    if verdict.phase:
        parts.append(f"phase {verdict.phase}")
    return ", ".join(parts)


def _failed_trial(record: Record, axes: Axes) -> FailedTrial:
    parts = []
    if record.exit_code is not None:
        parts.append(f"exit code {record.exit_code}")
    if record.duration_seconds is not None:
        parts.append(f"after {format_seconds(record.duration_seconds)}")
    return FailedTrial(
        id=record.id,
        label=name_trial(record.axes, axes, record.id, limit=120),
        ended=" ".join(parts),
        logs=f"trials/{record.id}/logs",
    )


def count_statuses(records: Sequence[Record]) -> list[tuple[str, int]]:
    """Count the records of each status, in the order of `TrialStatus`, zeros left out."""
    counts = ((s.value, sum(record.status is s for record in records)) for s in TrialStatus)
    return [(status, count) for status, count in counts if count]
