"""The facts around the numbers: headline figures, environment, commit and commands.

A fact that differs between trials is shown with all its values, so that no reader takes two
machines or two commits for one.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fsdpbench.bench.records import Record, TrialStatus
from fsdpbench.bench.statistics import summarize
from fsdpbench.errors import list_names
from fsdpbench.reports.axes import name_trial, plan_axes
from fsdpbench.reports.failures import count_statuses
from fsdpbench.reports.ranking import is_cpu_run, rank_records
from fsdpbench.reports.tables import ABSENT, format_count, format_value
from fsdpbench.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Fact:
    """A name and its value as text; `differs` when the trials do not agree on it."""

    name: str
    value: str
    differs: bool = False
    code: bool = False  # a command or a formula, shown in a fixed-width face


@dataclass(frozen=True)
class Headline:
    """One figure of the summary: what it is, the figure, and one line about it."""

    name: str
    figure: str
    detail: str = ""


def build_headlines(records: Sequence[Record]) -> list[Headline]:
    """Build the figures that open a report: best trial, spread, memory of the best, outcome."""
    ranked = rank_records(records)
    measured = [
        record
        for record in ranked
        if record.status is TrialStatus.OK and record.tokens_per_second is not None
    ]
    counts = ", ".join(f"{count} {status}" for status, count in count_statuses(records))
    outcome = Headline("Points", str(len(records)), counts or "no record yet")
    if not measured:
        return [_sync_headline(ranked), outcome]
    best, slowest = measured[0], measured[-1]
    axes = plan_axes(ranked)
    headlines = [
        Headline(
            "Best",
            f"{format_count(best.tokens_per_second or 0.0)} tokens/s",
            name_trial(best.axes, axes, best.id, limit=90),
        )
    ]
    summary = summarize(best.step_seconds)
    if summary is not None:
        detail = f"median of {summary.num_samples} steps of the best trial"
        headlines.append(Headline("Step time", format_seconds(summary.median), detail))
    if len(measured) > 1 and slowest.tokens_per_second and best.tokens_per_second:
        ratio = best.tokens_per_second / slowest.tokens_per_second
        label = name_trial(slowest.axes, axes, slowest.id, limit=90)
        headlines.append(Headline("Best over slowest", f"{ratio:.2f} x", f"slowest: {label}"))
    headlines.append(_memory_headline(best, is_cpu_run(ranked)))
    headlines.append(outcome)
    return headlines


def _sync_headline(ranked: Sequence[Record]) -> Headline:
    """Build the first figure of a run in which nothing was trained."""
    for record in ranked:
        if record.status is TrialStatus.OK and record.sync is not None:
            label = name_trial(record.axes, plan_axes(ranked), record.id, limit=90)
            pause = format_seconds(record.sync.pause_seconds)
            return Headline("Shortest pause", pause, f"of a weight update: {label}")
    return Headline("Best", ABSENT, "no trial was measured")


def _memory_headline(best: Record, on_cpu: bool) -> Headline:
    if on_cpu or best.peak_device_bytes is None:
        return Headline("Peak host memory", format_bytes(best.peak_host_bytes), "of the best trial")
    return Headline("Peak device memory", format_bytes(best.peak_device_bytes), "of the best trial")


def build_subtitle(name: str, records: Sequence[Record], sweep: Mapping[str, Any]) -> str:
    """Build the line under a report's title: the run, the devices it used and when it began."""
    parts = [f"Run {name}"]
    sizes = sorted({record.world_size for record in records if record.world_size})
    if sizes and records:
        what = "process" if is_cpu_run(records) else "GPU"
        span = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        plural = "" if sizes[-1] == 1 else "es" if what == "process" else "s"
        parts.append(f"{span} {what}{plural}")
    created = _created(records, sweep)
    if created:
        parts.append(created)
    return " | ".join(parts)


def _created(records: Sequence[Record], sweep: Mapping[str, Any]) -> str:
    started = [record.started_at for record in records if record.started_at]
    created = sweep.get("created_at") or min(started, default=None)
    return format_moment(format_value(created)) if created else ""


def format_moment(text: str) -> str:
    """Write an ISO 8601 time in UTC to the minute; what is none stays as it is."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC" if moment.tzinfo else text


def build_environment(records: Sequence[Record]) -> list[Fact]:
    """Merge the environments of all trials, nested keys joined by dots."""
    values: dict[str, dict[str, None]] = {}
    for record in records:
        for name, value in _flatten(record.environment):
            values.setdefault(name, {})[_environment_value(name, value)] = None
    return [_fact(name, list(found)) for name, found in values.items()]


def _environment_value(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        counts = Counter(value)
        return ", ".join(f"{count} x {item}" for item, count in counts.items()) or "none"
    return format_value(value)


def build_measurement(records: Sequence[Record]) -> list[Fact]:
    """Build the facts of how the numbers were taken: model, code, workload, formula, kernel."""
    facts = [
        _fact("model", _texts([record.model for record in records])),
        _fact("commit", _texts([_commit(record) for record in records])),
    ]
    varied: dict[str, list[Any]] = {
        "device": [record.device for record in records],
        "world size": [record.world_size for record in records],
        "attention kernel": [record.attention_kernel for record in records],
        "warm-up steps": [record.warmup_steps for record in records if record.step_seconds],
    }
    for record in records:
        for name, value in _flatten(record.workload):
            varied.setdefault(f"workload {name}", []).append(value)
    facts += [Fact(name, list_names(_texts(values))) for name, values in varied.items()]
    formulas = _texts([record.mfu_formula for record in records], limit=1000)
    facts += [Fact("MFU formula", formula, code=True) for formula in formulas]
    return [fact for fact in facts if fact.value]


def build_commands(records: Sequence[Record], sweep: Mapping[str, Any]) -> list[Fact]:
    """Build the commands: the one that made the sweep and the one that repeats the best trial."""
    facts = []
    created = _created(records, sweep)
    if created:
        facts.append(Fact("created", created))
    argv = sweep.get("argv")
    if isinstance(argv, list) and argv:
        facts.append(Fact("sweep command", shlex.join(map(str, argv)), code=True))
    if sweep.get("seed") is not None:
        facts.append(Fact("sweep seed", format_value(sweep["seed"])))
    ranked = rank_records(records)
    if ranked and ranked[0].status is TrialStatus.OK and ranked[0].command:
        facts.append(Fact("best trial", shlex.join(ranked[0].command), code=True))
    total = sum(record.duration_seconds or 0.0 for record in records)
    if total:
        facts.append(Fact("time in trials", format_seconds(total)))
    return facts


def _commit(record: Record) -> str | None:
    if record.commit is None:
        return None
    return f"{record.commit[:12]}, with uncommitted changes" if record.dirty else record.commit[:12]


def _texts(values: Sequence[Any], limit: int = 200) -> list[str]:
    return list(dict.fromkeys(format_value(value, limit) for value in values if value is not None))


def _fact(name: str, values: Sequence[str]) -> Fact:
    if len(values) <= 1:
        return Fact(name, "".join(values))
    return Fact(name, f"differs: {list_names(values)}", differs=True)


def _flatten(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
