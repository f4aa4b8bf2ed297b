"""Records nested spans of one rank at little cost, and next to none when off.

On the hot path a span reads the host's clock twice and, on an asynchronous device, records two
timing events on the current stream. Nothing waits for the device until the spans are asked for
(`events`, `phase_seconds`, `save`).

Note: device time on the host's axis. At the first read an anchor event and the host's clock were
taken together, once, at construction; the position of each event is the sum of the short distances
from event to event, since one long distance in float32 milliseconds loses microseconds.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from fsdpbench.engine.config.tracing import PerfTracerConfig
from fsdpbench.engine.device import Device
from fsdpbench.engine.tracing.events import CATEGORIES, SpanEvent, TraceHeader, save_events
from fsdpbench.errors import ConfigError, Violation
from fsdpbench.log import get_logger, warn_once

logger = get_logger(__name__)
_OFF: AbstractContextManager[None] = nullcontext()  # shared: an off tracer allocates nothing


@dataclass(slots=True)
class _RawSpan:
    """A span whose device events are not read yet."""

    name: str
    category: str
    thread: int
    depth: int
    start_ns: int
    end_ns: int
    device_start: Any
    device_end: Any
    stream: int | None
    error: str | None


class _Span:
    """Context manager of one running span."""

    __slots__ = ("category", "device_start", "name", "start_ns", "stream", "tracer")

    def __init__(self, tracer: Tracer, name: str, category: str) -> None:
        self.tracer = tracer
        self.name = name
        self.category = category

    def __enter__(self) -> None:
        tracer = self.tracer
        tracer._depths.value = getattr(tracer._depths, "value", -1) + 1
        self.stream = self.device_start = None
        self.start_ns = time.perf_counter_ns()
        if tracer._device_timed:
            self.stream = tracer.device.current_stream()
            self.device_start = tracer._take_event(self.stream)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        tracer = self.tracer
        # the stream of the entry: a body that switched streams must not split the pair
        device_end = tracer._take_event(self.stream) if tracer._device_timed else None
        end_ns = time.perf_counter_ns()
        depth = tracer._depths.value
        tracer._depths.value = depth - 1
        tracer._keep(
            _RawSpan(
                self.name,
                self.category,
                threading.get_ident(),
                depth,
                self.start_ns,
                end_ns,
                self.device_start,
                device_end,
                getattr(self.stream, "stream_id", None),
                kind.__name__ if kind else None,
            )
        )


class Tracer:
    """Spans of one rank. Create it after the device was made current."""

    def __init__(
        self, rank: int, device: Device, enabled: bool = True, max_events: int = 100_000
    ) -> None:
        self.rank = rank
        self.device = device
        self.enabled = enabled
        self.max_events = max_events
        self.num_dropped = 0
        self._device_timed = device.is_asynchronous
        self._depths = threading.local()
        self._raw: list[_RawSpan] = []
        self._events: list[SpanEvent] = []
        self._spare_events: list[Any] = []
        # Unix time of the monotonic clock's zero: ranks of one host share the axis exactly
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()
        self._anchor: tuple[Any, float] | None = None
        if enabled and self._device_timed:
            self._set_anchor()

    def span(self, name: str, category: str = "compute") -> AbstractContextManager[None]:
        """Time the `with` body; spans nest, per thread."""
        if not self.enabled:
            return _OFF
        if category not in CATEGORIES:
            allowed = f"must be one of {', '.join(CATEGORIES)}"
            raise ConfigError([Violation("category", repr(category), allowed)])
        return _Span(self, name, category)

    def events(self) -> list[SpanEvent]:
        """Return the finished spans in order of their ends. Waits for the device."""
        self._resolve()
        return list(self._events)

    def phase_seconds(self) -> dict[str, list[float]]:
        """Return every span's seconds by name, in order of their ends. Waits for the device."""
        phases: dict[str, list[float]] = {}
        for event in self.events():
            phases.setdefault(event.name, []).append(event.seconds)
        return phases

    def clear(self) -> None:
        """Forget the finished spans; running ones go on."""
        self._resolve()
        self._events.clear()
        self.num_dropped = 0

    def save(self, path: str | Path) -> Path:
        """Write the finished spans as this rank's trace file. Waits for the device."""
        self._resolve()
        target = Path(path)
        index = "" if self.device.index is None else f":{self.device.index}"
        header = TraceHeader(
            self.rank,
            f"{self.device.type}{index}",
            os.getpid(),
            socket.gethostname(),
            self.num_dropped,
        )
        save_events(target, header, self._events)
        return target

    def _keep(self, span: _RawSpan) -> None:
        if len(self._raw) + len(self._events) < self.max_events:
            self._raw.append(span)
            return
        self.num_dropped += 1
        warn_once(logger, f"tracing: more than max_events={self.max_events} spans; rest dropped")
        if span.device_start is not None:
            self._spare_events += (span.device_start, span.device_end)

    def _take_event(self, stream: Any) -> Any:
        event = self._spare_events.pop() if self._spare_events else self.device.event(timing=True)
        event.record(stream)
        return event

    def _set_anchor(self) -> None:
        self.device.synchronize()
        event = self.device.event(timing=True)
        event.record(self.device.current_stream())
        event.synchronize()
        self._anchor = (event, float(self._epoch_ns + time.perf_counter_ns()))

    def _resolve(self) -> None:
        """Turn raw spans into events; ends with a new anchor, so that distances stay short."""
        if not self._raw:
            return
        raw, self._raw = self._raw, []
        if self._device_timed:
            self.device.synchronize()
        for span in raw:
            device_start_ns = device_seconds = None
            if span.device_start is not None:
                device_start_ns, device_seconds = self._read_device(span)
            self._events.append(
                SpanEvent(
                    span.name,
                    span.category,
                    span.thread,
                    span.depth,
                    self._epoch_ns + span.start_ns,
                    (span.end_ns - span.start_ns) / 1e9,
                    device_start_ns,
                    device_seconds,
                    span.stream,
                    span.error,
                )
            )

    def _read_device(self, span: _RawSpan) -> tuple[int, float]:
        if self._anchor is None:  # enabled after construction
            self._set_anchor()
        assert self._anchor is not None
        last, last_ns = self._anchor
        start_ns = last_ns + last.elapsed_time(span.device_start) * 1e6
        seconds = span.device_start.elapsed_time(span.device_end) / 1e3
        self._spare_events += (last, span.device_start)
        self._anchor = (span.device_end, start_ns + seconds * 1e9)
        return round(start_ns), seconds


def build_tracer(config: PerfTracerConfig, rank: int, device: Device) -> Tracer:
    """Build the tracer that a configuration asks for."""
    return Tracer(rank, device, config.enabled, config.max_events)
