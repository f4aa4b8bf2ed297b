"""How long the phases of an update took, on rank 0: by the device's clock where it has one."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from fsdpbench.engine.device import Device


@dataclass(frozen=True)
class UpdateTimings:
    """One update. Phases overlap, so their sum may exceed the pause."""

    mode: str  # the channel that carried it: xccl or disk
    num_bytes: int = 0  # of the tensors on the wire, or 0 for disk
    num_buckets: int = 0
    pause_seconds: float = 0.0  # from before the pause to after the restart, all receivers
    connect_seconds: float = 0.0  # building groups; 0 when they stood already
    gather_seconds: float = 0.0  # shards to whole tensors
    pack_seconds: float = 0.0  # cast, and copy into buckets
    transfer_seconds: float = 0.0  # broadcasts, each from its begin to its end
    apply_seconds: float = 0.0  # from the end of a broadcast to the slowest receiver's answer
    verify_seconds: float = 0.0  # digests of both ends, and their comparison
    write_seconds: float = 0.0  # disk: before the pause

    def to_json(self) -> dict[str, Any]:
        """Return values that JSON holds."""
        return asdict(self)


class PhaseClock:
    """Sums of seconds by phase; device work is measured with events and read at the end."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._seconds: dict[str, float] = defaultdict(float)
        self._pairs: list[tuple[str, Any, Any]] = []

    def add(self, phase: str, seconds: float) -> None:
        """Count seconds of the host's clock."""
        self._seconds[phase] += seconds

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the body: its device work on the current stream, or the host's time on the CPU."""
        if not self.device.is_asynchronous:
            began = time.perf_counter()
            try:
                yield
            finally:
                self.add(name, time.perf_counter() - began)
            return
        begin = self.mark()
        yield
        self.add_events(name, begin, self.mark())

    def mark(self) -> Any:
        """Record an event on the current stream."""
        event = self.device.event(timing=True)
        event.record(self.device.current_stream())
        return event

    def add_events(self, name: str, begin: Any, end: Any) -> None:
        """Count the time between two recorded events."""
        self._pairs.append((name, begin, end))

    def read(self) -> dict[str, float]:
        """Return seconds by phase; waits for the device."""
        self.device.synchronize()
        for name, begin, end in self._pairs:
            self.add(name, begin.elapsed_time(end) / 1e3)
        self._pairs = []
        return dict(self._seconds)
