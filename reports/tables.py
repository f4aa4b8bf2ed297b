"""Tables as plain values: what every renderer shares, and how each quantity reads as text.

A `Table` holds text and the number it is sorted by; it knows nothing of HTML, Markdown or
terminals. An absent value reads `-`, and its cell says why wherever that is known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fsdpbench.bench.statistics import summarize
from fsdpbench.units import format_bytes, format_seconds

ABSENT = "-"


@dataclass(frozen=True)
class Column:
    """A column; `priority` 0 is never dropped, higher numbers go first on a narrow terminal."""

    key: str
    title: str
    numeric: bool = False
    hint: str = ""  # what the numbers mean, and how they were taken
    priority: int = 0


@dataclass(frozen=True)
class Cell:
    """One value: its text, the number to sort by, and a second line of detail."""

    text: str = ABSENT
    value: float | None = None
    detail: str = ""
    reason: str = ""  # why the value is absent
    tone: str = ""  # "", good, bad, warn or quiet


@dataclass(frozen=True)
class Row:
    """The cells of one record, in the order of the table's columns."""

    key: str
    cells: tuple[Cell, ...]
    tone: str = ""


@dataclass(frozen=True)
class Table:
    """Columns, rows, and the sentences that stand for what was left out of them."""

    title: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def column_index(self, key: str) -> int:
        """Return the position of a column; KeyError when the table has none of this key."""
        for index, column in enumerate(self.columns):
            if column.key == key:
                return index
        raise KeyError(key)

    def without(self, keys: Sequence[str]) -> Table:
        """Return the table less these columns."""
        kept = [i for i, column in enumerate(self.columns) if column.key not in keys]
        return Table(
            title=self.title,
            caption=self.caption,
            columns=tuple(self.columns[i] for i in kept),
            rows=tuple(
                Row(row.key, tuple(row.cells[i] for i in kept), row.tone) for row in self.rows
            ),
            notes=self.notes,
        )


def absent(reason: str) -> Cell:
    """Return the cell of a value that is missing for this reason."""
    return Cell(reason=reason, tone="quiet")


def text_cell(value: Any, reason: str = "") -> Cell:
    """Return a cell of any plain value as `format_value` writes it."""
    if value is None:
        return absent(reason)
    number = (
        float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    )
    return Cell(format_value(value), number)


def bytes_cell(num_bytes: float | None, reason: str, total_bytes: float | None = None) -> Cell:
    """Return a byte count, with its share of `total_bytes` as detail when that is given."""
    if num_bytes is None:
        return absent(reason)
    share = f"{num_bytes / total_bytes:.0%} of {format_bytes(total_bytes)}" if total_bytes else ""
    return Cell(format_bytes(num_bytes), float(num_bytes), share)


def seconds_cell(samples: Sequence[float], reason: str) -> Cell:
    """Return the median of the samples, with its 95 % interval and their number as detail."""
    summary = summarize(samples)
    if summary is None:
        return absent("a sample is not finite" if samples else reason)
    span = f"{format_range(summary.low, summary.high)}, n={summary.num_samples}"
    return Cell(format_seconds(summary.median), summary.median, span)


def rate_cell(per_second: float | None, reason: str) -> Cell:
    """Return a rate without its unit, which stands in the column title."""
    if per_second is None or not math.isfinite(per_second):
        return absent(reason)
    return Cell(format_count(per_second), per_second)


def percent_cell(fraction: float | None, reason: str) -> Cell:
    """Return a fraction as per cent."""
    if fraction is None or not math.isfinite(fraction):
        return absent(reason)
    return Cell(f"{fraction * 100:.1f} %", fraction)


def difference_cell(value: float | None, best: float | None, reason: str) -> Cell:
    """Return how far a higher-is-better value lies from the best one, in per cent of the best."""
    if value is None or not best or not math.isfinite(value):
        return absent(reason)
    if value == best:
        return Cell("best", 0.0, tone="good")
    fraction = value / best - 1
    return Cell(f"{fraction * 100:+.1f} %", fraction)


def format_count(number: float) -> str:
    """Write a positive quantity with about four significant digits and thousands set apart."""
    if abs(number) >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if abs(number) >= 10 else f"{number:.3g}"


def format_range(low: float, high: float) -> str:
    """Write two durations as a range, the unit once where both share it."""
    first, last = format_seconds(low), format_seconds(high)
    number, _, unit = first.rpartition(" ")
    if unit and last.endswith(f" {unit}") and " " not in number:
        return f"{number} - {last}"
    return f"{first} - {last}"


def format_value(value: Any, limit: int = 200) -> str:
    """Write a configuration value on one line, as YAML would; cut at `limit` characters."""
    if value is None:
        return "null"
    if isinstance(value, str):
        text = " ".join(value.split()) or '""'
    elif isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, float):
        text = f"{value:.6g}"
    elif isinstance(value, int):
        text = str(value)
    else:
        text = json.dumps(value, default=str)
    return shorten(text, limit)


def shorten(text: str, limit: int) -> str:
    """Cut a text to `limit` characters, three dots included."""
    return text if len(text) <= limit else f"{text[: limit - 3].rstrip()}..."
