"""How a step is timed, how it is logged, and which figures follow from the raw times.

seconds of a step = wall clock from a point where the device is idle to the next such point;
nothing inside the step is synchronised for the measurement. What a process keeps to its end is set
aside from Python's garbage collector before (`set_aside_objects`). Rates are medians over the
steps after warm-up of each step's own rate, since steps may differ in their tokens. Phase seconds
are sums over one step, then medians over steps. Pure but for the clock, the collector and the step
log.
"""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Self, TextIO, TypeVar

from fsdpbench.engine.tracing.events import SpanEvent

T = TypeVar("T")

STEP_SPAN = "step"  # the span that a worker puts around each step


@dataclass(frozen=True)
class StepRecord:
    """One finished step as `steps.jsonl` keeps it."""

    step: int  # from 0, warm-up included
    seconds: float
    loss: float
    grad_norm: float
    num_tokens: int  # real tokens over all data-parallel ranks
    warmup: bool


def time_step(run: Callable[[], T], synchronize: Callable[[], None]) -> tuple[T, float]:
    """Run one step and return its result and its wall seconds, the device idle at both ends."""
    synchronize()
    start = time.perf_counter()
    result = run()
    synchronize()
    return result, time.perf_counter() - start


def set_aside_objects() -> None:
    """Collect garbage, then leave all that is alive out of later collections, which stay on.

    A process with torch and a model has about a million objects that live to its end. A collection
    of the oldest generation visits all of them, which adds 200 ms to the step that it falls into:
    always the same step, for the collector counts allocations. `gc.unfreeze` is the reverse.
    """
    gc.collect()
    gc.freeze()


class StepLog:
    """`steps.jsonl`: a line is on disk's way before the next step starts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def __enter__(self) -> Self:
        self._file = self._path.open("a", encoding="ascii", buffering=1)  # flushed at each newline
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def append(self, record: StepRecord) -> None:
        """Write one line of strict JSON; a number that is not finite travels as a string."""
        assert self._file is not None, "the log is open only inside its `with` block"
        fields = {name: name_non_finite(value) for name, value in asdict(record).items()}
        self._file.write(json.dumps(fields) + "\n")


def name_non_finite(value: float) -> float | str:
    """Return the value, or "NaN", "Infinity" or "-Infinity", which JSON numbers cannot be."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def summarise_rate(steps: Sequence[StepRecord], amounts: Sequence[float]) -> float | None:
    """Return the median over measured steps of amount / seconds; None without a measured step."""
    rates = [
        amount / step.seconds
        for step, amount in zip(steps, amounts, strict=True)
        if not step.warmup and step.seconds > 0
    ]
    return median(rates) if rates else None


def summarise_phases(events: Iterable[SpanEvent], num_warmup: int) -> dict[str, float]:
    """Return seconds by phase name: medians over measured steps, and totals of what came before.

    A phase inside a step (forward, backward, ...) is summed over the step and over its spans; one
    outside of all steps (init, load, ...) is its total. Spans of other threads are left out, and so
    is a span nested in one of the same name.
    """
    ordered = sorted(events, key=lambda event: (event.start_ns, -event.host_seconds))
    steps = [event for event in ordered if event.name == STEP_SPAN]
    thread = steps[0].thread if steps else None
    totals: dict[str, float] = {}
    per_step: list[dict[str, float]] = [{} for _ in steps]
    enclosing: list[SpanEvent] = []
    for event in ordered:
        if thread is not None and event.thread != thread:
            continue
        enclosing = [span for span in enclosing if _end_ns(span) > event.start_ns]
        if all(span.name != event.name for span in enclosing):
            inside = next((span for span in enclosing if span.name == STEP_SPAN), None)
            if inside is not None:
                _add(per_step[steps.index(inside)], event)
            elif event.name != STEP_SPAN:
                _add(totals, event)
        enclosing.append(event)
    measured = per_step[num_warmup:]
    for name in dict.fromkeys(name for phases in measured for name in phases):
        totals[name] = median(phases.get(name, 0.0) for phases in measured)
    return totals


def _end_ns(event: SpanEvent) -> int:
    return event.start_ns + round(event.host_seconds * 1e9)


def _add(phases: dict[str, float], event: SpanEvent) -> None:
    phases[event.name] = phases.get(event.name, 0.0) + event.seconds
