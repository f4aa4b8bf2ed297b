"""When a running trial must be ended: its time limit, and heartbeats that stopped.

Pure: it is told the time and what the heartbeats look like. A heartbeat counts when it changes, so
jumps of the wall clock and clocks of network file systems do no harm.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal

Overrun = Literal["timeout", "hang"]


class Watchdog:
    """Judges one trial; times are seconds of one monotonic clock."""

    def __init__(self, started: float, timeout_seconds: float, hang_seconds: float) -> None:
        self._deadline = started + timeout_seconds
        self._hang_seconds = hang_seconds
        self._last_change = started  # start-up counts as life: the first beat has hang_seconds too
        self._last_seen: tuple[Hashable, ...] = ()

    def judge(self, now: float, beats: tuple[Hashable, ...]) -> Overrun | None:
        """Say which limit is passed. `beats` is any value that changes when some rank beats."""
        if beats != self._last_seen:
            self._last_seen, self._last_change = beats, now
        if now - self._last_change > self._hang_seconds:
            return "hang"
        return "timeout" if now > self._deadline else None
