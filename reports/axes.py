"""Which axes a set of trials varies, and the short name of a trial made from them.

An axis that has one value in every trial is said once, never repeated in each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdpbench.bench.records import Record
from fsdpbench.reports.tables import format_value, shorten

BARE_AXES = ("parallel", "backend")
"""Axes whose values name themselves (`fsdp:d4c2t1`), so that labels leave their names out."""


@dataclass(frozen=True)
class Axis:
    """A varied axis: its dotted path and the shortest title that tells it from the others."""

    path: str
    title: str


@dataclass(frozen=True)
class Axes:
    """The axes of a run: those that vary, in the order of the space, and the constant ones."""

    varied: tuple[Axis, ...]
    constant: tuple[tuple[str, str], ...]  # (title, value as text)


def plan_axes(records: Sequence[Record]) -> Axes:
    """Sort the axes of all records into varied and constant ones."""
    paths: dict[str, None] = {}
    for record in records:
        paths.update(dict.fromkeys(record.axes))
    titles = plan_titles(list(paths))
    varied: list[Axis] = []
    constant: list[tuple[str, str]] = []
    for path in paths:
        values = {format_value(record.axes[path]) for record in records if path in record.axes}
        everywhere = all(path in record.axes for record in records)
        if len(values) == 1 and everywhere and len(records) > 1:
            constant.append((titles[path], values.pop()))
        else:
            varied.append(Axis(path, titles[path]))
    return Axes(tuple(varied), tuple(constant))


def plan_titles(paths: Sequence[str]) -> dict[str, str]:
    """Give each dotted path the shortest tail that no other path ends in."""
    titles = {}
    for path in paths:
        parts = path.split(".")
        for length in range(1, len(parts) + 1):
            tail = ".".join(parts[-length:])
            if sum(f".{other}".endswith(f".{tail}") for other in paths) == 1:
                break
        titles[path] = tail
    return titles


def name_trial(values: Mapping[str, Any], axes: Axes, fallback: str, limit: int = 80) -> str:
    """Name a trial by its varied axes: `fsdp:d2 +offload_params`; `fallback` without any.

    A switch reads `+name` when it is on and is left out when it is off, unless the name would
    then be empty.
    """
    present = [(axis, values[axis.path]) for axis in axes.varied if axis.path in values]
    parts = [_part(axis, value) for axis, value in present if value is not False]
    if not parts:
        parts = [f"{axis.title}=false" for axis, _ in present]
    return shorten(" ".join(parts) or fallback, limit)


def _part(axis: Axis, value: Any) -> str:
    if axis.path in BARE_AXES:
        return format_value(value)
    return f"+{axis.title}" if value is True else f"{axis.title}={format_value(value)}"
