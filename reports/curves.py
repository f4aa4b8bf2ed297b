"""Curves of single trials: the loss over steps, and memory over time for the page to pick from.

Points are shared out over the trials, so that a page of 500 trials stays as light as one of five.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fsdpbench.bench.records import Record
from fsdpbench.reports.axes import Axes, name_trial, plan_axes
from fsdpbench.reports.plots import PALETTE, Figure, choose_byte_scale, plain
from fsdpbench.reports.ranking import rank_records
from fsdpbench.reports.run import Run
from fsdpbench.reports.series import Series, read_loss, read_memory, thin

MAX_CURVES = 16
LOSS_POINTS = 300
MEMORY_POINTS = 120_000
"""Points of memory curves in one page, over all trials."""
CURVES_PER_TRIAL = 4  # a usual trial's: allocated, reserved, NVML, host


@dataclass(frozen=True)
class MemoryCurves:
    """The memory curves of one trial in one unit, or why there are none."""

    trial_id: str
    label: str
    unit: str
    series: tuple[Series, ...]
    empty_reason: str = ""


def plan_memory_curves(run: Run) -> list[MemoryCurves]:
    """Plan the memory over time of every started trial, in ranking order."""
    ranked = rank_records(run.records)
    axes = plan_axes(ranked)
    share = MEMORY_POINTS // max(1, len(ranked) * CURVES_PER_TRIAL)
    limit = min(600, max(40, share))
    return [
        _curves_of(run, record, axes, place, limit) for place, record in enumerate(ranked, start=1)
    ]


def _curves_of(run: Run, record: Record, axes: Axes, place: int, limit: int) -> MemoryCurves:
    label = f"{place}  {name_trial(record.axes, axes, record.id, limit=90)}"
    if record.status.value != "ok":
        label += f" ({record.status.value})"
    folder = run.trial(record.id)
    if folder is None:
        reason = f"The folder trials/{record.id} is not there."
        return MemoryCurves(record.id, label, "MiB", (), reason)
    series = read_memory(folder.samples_path, limit)
    if not series:
        reason = f"trials/{record.id}/samples.jsonl holds no memory samples."
        return MemoryCurves(record.id, label, "MiB", (), reason)
    scale, unit = choose_byte_scale([curve.peak for curve in series])
    scaled = tuple(
        Series(
            plain(curve.name),
            tuple(round(x, 2) for x in curve.x),
            tuple(round(y / scale, 3) for y in curve.y),
            curve.lowest,
        )
        for curve in series
    )
    return MemoryCurves(record.id, label, unit, scaled)


def plan_loss_curves(run: Run) -> Figure:
    """Plan the loss of each trial over its steps, failed trials with finished steps included."""
    ranked = rank_records(run.records)
    axes = plan_axes(ranked)
    curves: list[tuple[Record, Series]] = []
    for record in ranked:
        series = _loss_of(run, record)
        if series is not None:
            curves.append((record, series))
        if len(curves) == MAX_CURVES:
            break
    more = " Only the first curves of the ranking are drawn." if len(curves) == MAX_CURVES else ""
    figure = Figure(
        "loss",
        "Loss",
        f"Training loss by step, warm-up included.{more}",
        empty_reason="" if curves else "No step of any trial has finished.",
    )
    figure.traces.extend(
        _loss_trace(index, record, series, axes) for index, (record, series) in enumerate(curves)
    )
    figure.layout.update(
        xaxis={"title": {"text": "step"}, "tickformat": ",d"},
        yaxis={"title": {"text": "loss"}},
        showlegend=len(curves) > 1,
        hovermode="closest",
    )
    return figure


def _loss_of(run: Run, record: Record) -> Series | None:
    """Read the trial's steps; without its folder the record's own losses serve."""
    folder = run.trial(record.id)
    series = read_loss(folder.steps_path, LOSS_POINTS) if folder else None
    if series is None and any(map(math.isfinite, record.losses)):
        finite = [(i, loss) for i, loss in enumerate(record.losses) if math.isfinite(loss)]
        x, y = thin([float(step) for step, _ in finite], [loss for _, loss in finite], LOSS_POINTS)
        series = Series("loss", tuple(x), tuple(y))
    return series


def _loss_trace(index: int, record: Record, series: Series, axes: Axes) -> dict[str, Any]:
    failed = record.status.is_failure
    label = name_trial(record.axes, axes, record.id, limit=44)
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(series.x) <= 40 else "lines",
        "name": plain(f"{label} ({record.status.value})" if failed else label),
        "x": list(series.x),
        "y": [round(value, 5) for value in series.y],
        "line": {
            "color": PALETTE[index % len(PALETTE)],
            "width": 2,
            "dash": "dot" if failed else ("solid", "dash")[index // len(PALETTE) % 2],
        },
        "marker": {"size": 5},
        "hovertemplate": "step %{x}: %{y}<extra>%{fullData.name}</extra>",
    }
