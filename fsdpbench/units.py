"""Numbers as people read them. Pure string formatting and parsing; no measurement."""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def format_bytes(num_bytes: float | None) -> str:
    """Format a byte count in binary units: `1.50 GiB`; `-` for None."""
    if num_bytes is None:
        return "-"
    for factor, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float | None) -> str:
    """Format a duration: `850 ms`, `12.3 s`, `4 min 05 s`; `-` for None."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def format_rate(per_second: float | None) -> str:
    """Format a rate with a metric suffix: `45.9k`; `-` for None."""
    if per_second is None:
        return "-"
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(per_second) >= factor:
            return f"{per_second / factor:.1f}{suffix}"
    return f"{per_second:.1f}"
