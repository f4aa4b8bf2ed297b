"""Curves over time, read from a trial's JSON Lines files and thinned to what a page can carry.

Thinning keeps the first and the last point and both extremes of every bucket, so that no peak
of a memory curve is lost. A line that cannot be read is skipped and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpbench.bench.json_text import parse_object

MAX_NUMBER = 1e300
"""A larger number is no measurement; it also keeps huge JSON integers within a float."""

Curve = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Series:
    """One curve: `x` ascending (seconds since the first sample, or steps), `y` in plain units."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    lowest: bool = False  # the rank with the lowest peak, drawn beside the highest

    @property
    def peak(self) -> float:
        """Return the largest value."""
        return max(self.y)


def thin(x: Sequence[float], y: Sequence[float], limit: int) -> tuple[list[float], list[float]]:
    """Keep about `limit` points of a curve (at least 4), each bucket's extremes among them."""
    count = len(x)
    buckets = max(1, (max(limit, 4) - 2) // 2)
    if count <= 2 * buckets + 2:
        return list(x), list(y)
    kept = {0, count - 1}
    for bucket in range(buckets):
        members = range(bucket * count // buckets, (bucket + 1) * count // buckets)
        kept.add(min(members, key=y.__getitem__))
        kept.add(max(members, key=y.__getitem__))
    ordered = sorted(kept)
    return [x[i] for i in ordered], [y[i] for i in ordered]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, torn or foreign lines skipped; nothing if it is absent."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    yield parse_object(line)
                except ValueError:  # a torn line: the others stand
                    continue
    except OSError:  # no such trial folder, or not readable: the page says that there is no data
        return


def number(value: Any) -> float | None:
    """Return a finite float of a JSON value, else None (`NaN` travels as a string)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -MAX_NUMBER < value < MAX_NUMBER else None


def read_loss(path: Path, limit: int) -> Series | None:
    """Read the losses of a `steps.jsonl`; x is the step; None when there is none."""
    steps: list[float] = []
    losses: list[float] = []
    for line in read_lines(path):
        step, loss = number(line.get("step")), number(line.get("loss"))
        if step is not None and loss is not None:
            steps.append(step)
            losses.append(loss)
    if not steps:
        return None
    x, y = thin(steps, losses, limit)
    return Series("loss", tuple(x), tuple(y))


def read_memory(path: Path, limit: int) -> list[Series]:
    """Read the byte curves of a `samples.jsonl`, in seconds since the first sample.

    Of each quantity the rank with the highest peak is kept, and the one with the lowest if it
    differs by more than a tenth: two curves tell an imbalance, a hundred hide it.
    """
    curves = {key: curve for key, curve in _collect(path).items() if any(curve[1])}
    start = min((times[0] for times, _ in curves.values()), default=0.0)
    kept: list[Series] = []
    for quantity in dict.fromkeys((source, name) for source, name, _ in curves):
        ranks = {key[2]: curve for key, curve in curves.items() if key[:2] == quantity}
        peaks = {rank: max(values) for rank, (_, values) in ranks.items()}
        highest = max(peaks, key=peaks.__getitem__)
        lowest = min(peaks, key=peaks.__getitem__)
        uneven = peaks[lowest] < 0.9 * peaks[highest]
        for rank in [highest, lowest] if uneven else [highest]:
            times, values = ranks[rank]
            x, y = thin([time - start for time in times], values, limit)
            name = _name(*quantity, rank if len(ranks) > 1 else "")
            kept.append(Series(name, tuple(x), tuple(y), lowest=rank != highest))
    return kept


def _collect(path: Path) -> dict[tuple[str, str, str], Curve]:
    """Collect (times, values) by source, field and rank; byte fields end in `_bytes`."""
    curves: dict[tuple[str, str, str], Curve] = {}
    for line in read_lines(path):
        time = number(line.get("t"))
        if time is None:
            continue
        source = str(line.get("source", ""))
        rank = "" if line.get("rank") is None else str(line["rank"])
        for name, value in line.items():
            if not name.endswith("_bytes") or name.startswith("peak_"):
                continue
            amount = number(value)
            if amount is None:
                continue
            curve = curves.setdefault((source, name, rank), ([], []))
            curve[0].append(time)
            curve[1].append(amount)
    return curves


def _name(source: str, name: str, rank: str) -> str:
    words = name.removesuffix("_bytes").replace("_", " ")
    words = {"rss": "resident", "process": "of this process"}.get(words, words)
    shown = "NVML" if source == "nvml" else source
    named = f"{words} ({shown})" if shown else words
    return f"{named}, rank {rank}" if rank else named
