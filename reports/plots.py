"""Figures as plain Plotly data: what to draw, never how it looks in light or dark.

Colours are written as `@name` and resolved by the page from its style sheet, so one figure
serves both colour schemes and print. This module alone knows the plotly package, which it
reads only for the JavaScript that the page embeds.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdpbench.bench.records import Record, TrialStatus
from fsdpbench.reports.axes import Axes, name_trial, plan_axes
from fsdpbench.reports.ranking import is_cpu_run, rank_records
from fsdpbench.reports.tables import median, sort_finite
from fsdpbench.units import GIB, MIB, format_bytes, format_seconds

MAX_BARS = 24
PALETTE = tuple(f"@series-{index}" for index in range(1, 9))
STARTUP_PHASES = ("init", "load", "build")
"""Phases that happen once a trial; they would dwarf those of a step in one chart."""
MEMORY_BARS = (
    ("peak_device_bytes", "peak device (allocator)", "@series-1"),
    ("peak_reserved_bytes", "peak reserved (allocator)", "@series-2"),
    ("device_total_bytes", "device total (as nvidia-smi)", "@series-3"),
)


@dataclass(frozen=True)
class Figure:
    """One chart: Plotly traces and layout, its words, and the reason when it has no data."""

    key: str
    title: str
    caption: str
    traces: list[dict[str, Any]] = field(default_factory=list)
    layout: dict[str, Any] = field(default_factory=dict)
    empty_reason: str = ""
    height: int = 380
    narrow_labels: list[str] = field(default_factory=list)  # y labels where there is no room


def plotly_javascript() -> str:
    """Return plotly.js from the installed plotly package."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def plain(text: str) -> str:
    """Escape a text for Plotly, which reads a few HTML tags in its labels."""
    return html.escape(text, quote=False)


def plan_charts(records: Sequence[Record]) -> list[Figure]:
    """Plan the charts of a run's measured trials; each stands even without data."""
    ranked = rank_records(records)
    axes = plan_axes(ranked)
    measured = [r for r in ranked if sort_finite(r.step_seconds) and not _is_failed(r)]
    return [
        plan_trade_off(measured, axes),
        plan_step_bars(measured, axes),
        plan_memory_bars(measured, axes),
        plan_phase_bars(measured, axes),
    ]


def plan_trade_off(measured: Sequence[Record], axes: Axes) -> Figure:
    """Plan the scatter of speed against memory: the best trials lie up and to the left."""
    on_cpu = is_cpu_run(measured)
    field_name = "peak_host_bytes" if on_cpu else "peak_device_bytes"
    points = [
        (record, getattr(record, field_name), record.tokens_per_second)
        for record in measured
        if getattr(record, field_name) is not None and record.tokens_per_second is not None
    ]
    where = "host" if on_cpu else "device"
    figure = Figure(
        "trade-off",
        "Speed against memory",
        f"Each point is a trial; up is faster, left takes less {where} memory.",
        empty_reason="" if points else "No trial has both a rate and a memory peak.",
    )
    if not points:
        return figure
    scale, unit = choose_byte_scale([size for _, size, _ in points])
    figure.traces.append(
        {
            "type": "scatter",
            "mode": "markers",
            "x": [round(size / scale, 3) for _, size, _ in points],
            "y": [round(rate, 2) for _, _, rate in points],
            "text": [plain(name_trial(r.axes, axes, r.id)) for r, _, _ in points],
            "hovertemplate": f"%{{text}}<br>%{{y:,.0f}} tokens/s<br>%{{x}} {unit}<extra></extra>",
            "marker": {
                "size": 12,
                "color": ["@series-2", *["@series-1"] * (len(points) - 1)],
                "line": {"width": 1, "color": "@surface"},
            },
        }
    )
    figure.layout.update(
        xaxis={"title": {"text": f"peak {where} memory, {unit}"}, "rangemode": "tozero"},
        yaxis={"title": {"text": "tokens/s"}, "rangemode": "tozero"},
    )
    return figure


def plan_step_bars(measured: Sequence[Record], axes: Axes) -> Figure:
    """Plan the bars of the median step, whiskers from the fastest to the slowest step."""
    shown = measured[:MAX_BARS]
    times = [sort_finite(record.step_seconds) for record in shown]
    middles = [median(ordered) for ordered in times]
    scale, unit = choose_time_scale(middles)
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "x": [round(middle / scale, 4) for middle in middles],
            "y": _labels(shown, axes),
            "error_x": {
                "type": "data",
                "symmetric": False,
                "array": [round((t[-1] - median(t)) / scale, 4) for t in times],
                "arrayminus": [round((median(t) - t[0]) / scale, 4) for t in times],
                "color": "@muted",
                "thickness": 1.2,
                "width": 3,
            },
            "marker": {"color": "@series-1"},
            "text": [format_seconds(middle) for middle in middles],
            "textposition": "inside",
            "insidetextanchor": "start",
            "hovertemplate": "%{y}<br>median %{text}<extra></extra>",
        }
    ]
    return _bars(
        "step-time",
        "Step time",
        "Median time of a step after warm-up; whiskers reach from the fastest to the slowest step.",
        traces,
        shown,
        measured,
        f"step time, {unit}",
    )


def plan_memory_bars(measured: Sequence[Record], axes: Axes) -> Figure:
    """Plan the bars of the memory peaks, side by side for each trial."""
    shown = measured[:MAX_BARS]
    kinds: tuple[tuple[str, str, str], ...] = MEMORY_BARS
    if is_cpu_run(measured):
        kinds = (("peak_host_bytes", "peak host", "@series-1"),)
    found = [getattr(record, name) for name, _, _ in kinds for record in shown]
    sizes = [size for size in found if size is not None]
    scale, unit = choose_byte_scale(sizes)
    traces = []
    for name, title, color in kinds:
        values = [getattr(record, name) for record in shown]
        if any(value is not None for value in values):
            traces.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": title,
                    "x": [None if value is None else round(value / scale, 3) for value in values],
                    "y": _labels(shown, axes),
                    "marker": {"color": color},
                    "text": ["" if value is None else format_bytes(value) for value in values],
                    "textposition": "none" if len(kinds) > 1 else "inside",
                    "insidetextanchor": "start",
                    "hovertemplate": f"%{{y}}<br>{title}: %{{text}}<extra></extra>",
                }
            )
    caption = "Highest memory of the whole trial, maximum over ranks."
    if len(traces) > 1:
        caption += " What nvidia-smi shows includes the CUDA context and other libraries."
    figure = _bars("memory", "Peak memory", caption, traces, shown, measured, f"memory, {unit}")
    if not traces:
        return Figure(figure.key, figure.title, caption, empty_reason="No memory was recorded.")
    return figure


def plan_phase_bars(measured: Sequence[Record], axes: Axes) -> Figure:
    """Plan the stacked bars of where a step's time goes."""
    shown = [record for record in measured if record.phases][:MAX_BARS]
    names = dict.fromkeys(name for record in shown for name in record.phases)
    step_names = [name for name in names if name not in STARTUP_PHASES]
    scale, unit = choose_time_scale(
        [sum(record.phases.get(name, 0.0) for name in step_names) for record in shown]
    )
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": plain(name),
            "x": [round(record.phases.get(name, 0.0) / scale, 4) for record in shown],
            "y": _labels(shown, axes),
            "marker": {"color": PALETTE[index % len(PALETTE)]},
            "text": [
                f"{plain(name)}: {format_seconds(record.phases.get(name, 0.0))}" for record in shown
            ],
            "textposition": "none",
            "hovertemplate": "%{y}<br>%{text}<extra></extra>",
        }
        for index, name in enumerate(step_names)
    ]
    figure = _bars(
        "phases",
        "Phases of a step",
        "Median seconds of each phase, one on the other. What happens once a trial is left out.",
        traces,
        shown,
        [record for record in measured if record.phases],
        f"time, {unit}",
    )
    figure.layout["barmode"] = "stack"
    if not traces:
        reason = "No phases were recorded; the tracer was off."
        return Figure(figure.key, figure.title, figure.caption, empty_reason=reason)
    return figure


def choose_byte_scale(sizes: Sequence[float]) -> tuple[float, str]:
    """Return the divisor and the unit that suit the largest of these byte counts."""
    return (GIB, "GiB") if max(sizes, default=0) >= GIB else (MIB, "MiB")


def choose_time_scale(seconds: Sequence[float]) -> tuple[float, str]:
    """Return the divisor and the unit that suit the longest of these durations."""
    return (1.0, "s") if max(seconds, default=0.0) >= 1 else (1e-3, "ms")


def _is_failed(record: Record) -> bool:
    return record.status.is_failure and record.status is not TrialStatus.CONTAMINATED


def _labels(records: Sequence[Record], axes: Axes) -> list[str]:
    """Name the bars; the place in front keeps two trials of one name apart."""
    return [
        plain(f"{place}  {name_trial(record.axes, axes, record.id, limit=44)}")
        for place, record in enumerate(records, start=1)
    ]


def _bars(
    key: str,
    title: str,
    caption: str,
    traces: list[dict[str, Any]],
    shown: Sequence[Record],
    all_records: Sequence[Record],
    axis_title: str,
) -> Figure:
    """Lay out horizontal bars, the best trial on top."""
    if len(shown) < len(all_records):
        caption += f" The best {len(shown)} of {len(all_records)} trials are drawn."
    groups = len(traces) if key == "memory" else 1
    return Figure(
        key,
        title,
        caption,
        traces=traces if shown else [],
        layout={
            "barmode": "group",
            "bargap": 0.32,
            "xaxis": {"title": {"text": axis_title}, "rangemode": "tozero"},
            "yaxis": {"autorange": "reversed", "automargin": True, "type": "category"},
            "showlegend": len(traces) > 1,
        },
        empty_reason="" if shown else "No trial was measured.",
        height=130 + len(shown) * (18 + 12 * groups),
        narrow_labels=[f"#{place}" for place in range(1, len(shown) + 1)],
    )
