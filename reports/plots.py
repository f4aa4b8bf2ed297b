"""Figures as plain Plotly data: what to draw, never how it looks in light or dark.

Colours are written as `@name` and resolved by the page from its style sheet, so one figure
serves both colour schemes and print. This module alone knows the plotly package, which it
reads only for the JavaScript that the page embeds.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fsdpbench.bench.plain_text import clean_text
from fsdpbench.bench.records import Record, TrialStatus
from fsdpbench.bench.statistics import summarize
from fsdpbench.bench.sync_record import steady_pauses
from fsdpbench.reports.axes import BARE_AXES, Axes, name_trial, plan_axes
from fsdpbench.reports.ranking import is_cpu_run, rank_records
from fsdpbench.reports.tables import format_value, shorten
from fsdpbench.units import GIB, MIB, format_bytes, format_seconds

MAX_BARS = 24
LABEL_WIDTH = 36
PALETTE = tuple(f"@series-{index}" for index in range(1, 9))
OUTSIDE_PHASES = ("init", "build", "parallelize", "load", "save", "update_weights")
"""Phases outside of steps: totals of a trial, which would dwarf those of a step in one chart."""
NO_STEP = "No training step was measured."
MEMORY_BARS = (
    ("peak_device_bytes", "peak device", "@series-1"),
    ("peak_reserved_bytes", "peak reserved", "@series-2"),
    ("device_total_bytes", "device total", "@series-3"),
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
    return html.escape(clean_text(text), quote=False)


def plan_charts(records: Sequence[Record]) -> list[Figure]:
    """Plan the charts of a run's measured trials; each stands even without data."""
    ranked = rank_records(records)
    axes = plan_axes(ranked)
    measured = [record for record in ranked if not _is_failed(record)]
    charts = [
        plan_trade_off(measured, axes),
        plan_step_bars(measured, axes),
        plan_memory_bars(measured, axes),
        plan_phase_bars(measured, axes),
    ]
    if any(record.sync is not None for record in measured):
        charts.append(plan_pause_bars(measured, axes))
    return charts


def plan_trade_off(measured: Sequence[Record], axes: Axes) -> Figure:
    """Plan the scatter of speed against memory, one colour for each value of the first axis."""
    where = "host" if is_cpu_run(measured) else "device"
    field_name = f"peak_{where}_bytes"
    points = [
        record
        for record in measured
        if getattr(record, field_name) is not None and record.tokens_per_second is not None
    ]
    scale, unit = choose_byte_scale([getattr(record, field_name) for record in points])
    groups: dict[str, list[Record]] = {}
    for record in points:
        groups.setdefault(_color_group(record, axes), []).append(record)
    traces = [
        {
            "type": "scatter",
            "mode": "markers+text",
            "name": plain(name),
            "x": [round(getattr(record, field_name) / scale, 3) for record in members],
            "y": [round(record.tokens_per_second or 0.0, 2) for record in members],
            "text": ["best" if record is measured[0] else "" for record in members],
            "textposition": "top center",
            "cliponaxis": False,
            "customdata": [plain(name_trial(r.axes, axes, r.id)) for r in members],
            "hovertemplate": "%{customdata}<br>%{y:,.0f} tokens/s<br>%{x} "
            f"{unit}<extra></extra>",
            "marker": {
                "size": 12,
                "color": PALETTE[index % len(PALETTE)],
                "line": {"width": 1, "color": "@surface"},
            },
        }
        for index, (name, members) in enumerate(groups.items())
    ]
    return Figure(
        "trade-off",
        "Speed against memory",
        f"Each point is a trial; up is faster, left takes less {where} memory.",
        traces=traces,
        layout={
            "xaxis": {"title": {"text": f"peak {where} memory, {unit}"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": "tokens/s"}, "rangemode": "tozero"},
            "showlegend": len(groups) > 1,
        },
        empty_reason="" if points else "No trial has both a rate and a memory peak.",
        height=bar_height(len(measured[:MAX_BARS])),
    )


def _color_group(record: Record, axes: Axes) -> str:
    """Return the value that colours a trial: of the mesh axis if it varies, else of the first."""
    ordered = sorted(axes.varied, key=lambda axis: axis.path not in BARE_AXES)
    if not ordered:
        return ""
    value = format_value(record.axes.get(ordered[0].path), limit=24)
    return value if ordered[0].path in BARE_AXES else f"{ordered[0].title}={value}"


def bar_height(num_bars: int) -> int:
    """Return the height in pixels of a chart of horizontal bars with two-line labels."""
    return max(300, 120 + 36 * num_bars)


def plan_step_bars(measured: Sequence[Record], axes: Axes) -> Figure:
    """Plan the bars of the median step, whiskers over its 95 % interval."""
    samples = [(record, record.step_seconds) for record in measured]
    caption = "Median time of a step after warm-up; whiskers span the 95 % interval of the median."
    figure = _median_bars("step-time", "Step time", caption, samples, axes)
    return replace(figure, empty_reason=NO_STEP) if measured and not figure.traces else figure


def plan_pause_bars(measured: Sequence[Record], axes: Axes) -> Figure:
    """Plan the bars of the median pause of a weight update, whiskers over its 95 % interval."""
    samples = [(record, steady_pauses(record.sync)) for record in measured]
    caption = (
        "Median time for which an update of the weights stops generation; whiskers span the "
        "95 % interval of the median."
    )
    return _median_bars("sync-pause", "Pause of a weight update", caption, samples, axes)


def _median_bars(
    key: str,
    title: str,
    caption: str,
    samples: Sequence[tuple[Record, Sequence[float]]],
    axes: Axes,
) -> Figure:
    """Plan a bar for each record that has samples in seconds."""
    timed = [(record, summary) for record, taken in samples if (summary := summarize(taken))]
    shown = [record for record, _ in timed[:MAX_BARS]]
    summaries = [summary for _, summary in timed[:MAX_BARS]]
    scale, unit = choose_time_scale([summary.median for summary in summaries])
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "x": [round(summary.median / scale, 4) for summary in summaries],
            "y": _labels(shown, axes),
            "error_x": {
                "type": "data",
                "symmetric": False,
                "array": [round((s.high - s.median) / scale, 4) for s in summaries],
                "arrayminus": [round((s.median - s.low) / scale, 4) for s in summaries],
                "color": "@text",
                "thickness": 1.2,
                "width": 3,
            },
            "marker": {"color": "@series-1"},
            "text": [format_seconds(summary.median) for summary in summaries],
            "textposition": "inside",
            "textangle": 0,
            "insidetextanchor": "start",
            "hovertemplate": "%{y}<br>median %{text}<extra></extra>",
        }
    ]
    all_timed = [record for record, _ in timed]
    return _bars(key, title, caption, traces, shown, all_timed, f"{title.lower()}, {unit}")


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
        caption += " Device total is what nvidia-smi shows; the others are the allocator's."
    figure = _bars("memory", "Peak memory", caption, traces, shown, measured, f"memory, {unit}")
    if not traces:
        return Figure(figure.key, figure.title, caption, empty_reason="No memory was recorded.")
    return figure


def plan_phase_bars(measured: Sequence[Record], axes: Axes) -> Figure:
    """Plan the stacked bars of where a step's time goes."""
    trained = [record for record in measured if record.phases and record.step_seconds]
    shown = trained[:MAX_BARS]
    names = dict.fromkeys(name for record in shown for name in record.phases)
    step_names = [name for name in names if name not in OUTSIDE_PHASES]
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
        "Median seconds of each phase, one on the other. What is outside of steps is left out.",
        traces,
        shown,
        trained,
        f"time, {unit}",
    )
    figure.layout["barmode"] = "stack"
    if not traces:
        reason = "No phases were recorded; the tracer was off."
        if not any(record.step_seconds for record in measured):
            reason = NO_STEP
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
    labels = []
    for place, record in enumerate(records, start=1):
        name = f"{place}  {name_trial(record.axes, axes, record.id)}"
        lines = [shorten(line, LABEL_WIDTH) for line in textwrap.wrap(name, LABEL_WIDTH)]
        if len(lines) > 2:
            lines = [lines[0], shorten(" ".join(lines[1:]), LABEL_WIDTH)]
        labels.append("<br>".join(map(plain, lines)))
    return labels


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
    return Figure(
        key,
        title,
        caption,
        traces=traces if shown else [],
        layout={
            "barmode": "group",
            "uniformtext": {"mode": "hide", "minsize": 10},  # a text that does not fit its bar
            "bargap": 0.32 if len(shown) > 4 else 0.6,
            "xaxis": {"title": {"text": axis_title}, "rangemode": "tozero"},
            "yaxis": {"autorange": "reversed", "automargin": True, "type": "category"},
            "showlegend": len(traces) > 1,
        },
        empty_reason="" if shown else "No trial was measured.",
        height=bar_height(len(shown)),
        narrow_labels=[f"#{place}" for place in range(1, len(shown) + 1)],
    )
