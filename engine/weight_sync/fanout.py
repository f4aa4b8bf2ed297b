"""Calls to several rollout engines at once, with a time-out, and errors that name the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from fsdpbench.engine.protocols import InferenceEngine
from fsdpbench.errors import WeightSyncError

T = TypeVar("T")
THREAD_NAME = "weight-sync"
COURTESY_SECONDS = 5.0  # for what may fail: an engine that hangs has had its time-out already
GRACE_SECONDS = 1.0  # beyond the time-out, since a group's or an engine's own error says more
REMEDY = (
    "Check that the engine runs and the network between the machines, or switch "
    "weight_update_mode to disk."
)


class Fanout:
    """The rollout engines of one trainer, called in parallel from its rank 0.

    Nothing waits much longer than `timeout_seconds`. An engine's error, of whatever kind, becomes a
    WeightSyncError that names the engine and the phase.
    """

    def __init__(self, engines: Sequence[InferenceEngine], timeout_seconds: float) -> None:
        self.engines, self.timeout_seconds = tuple(engines), timeout_seconds

    @property
    def courtesy_seconds(self) -> float:
        """How long `ask` waits."""
        return min(self.timeout_seconds, COURTESY_SECONDS)

    def label(self, index: int) -> str:
        """Return what messages call an engine."""
        return f"receiver {index} ({self.engines[index].traits.dialect})"

    def start(self, call: Callable[[InferenceEngine], T]) -> list[Future[T]]:
        """Begin a blocking call of every engine; return the outcomes by engine."""
        return [_run_aside(call, engine) for engine in self.engines]

    def begin(self, call: Callable[[int, InferenceEngine], Future[T]]) -> list[Future[T]]:
        """Begin a call that returns a Future of every engine; the outcomes hold what it raises."""

        def run(index: int) -> T:
            return call(index, self.engines[index]).result(self.timeout_seconds + GRACE_SECONDS)

        return [_run_aside(run, index) for index in range(len(self.engines))]

    def call(self, phase: str, call: Callable[[InferenceEngine], T]) -> list[T]:
        """Call a blocking method of every engine; return the results by engine."""
        return self.collect(phase, self.start(call))

    def collect(self, phase: str, futures: Sequence[Future[T]]) -> list[T]:
        """Wait for one Future of each engine and return their results."""
        deadline = time.monotonic() + self.timeout_seconds + GRACE_SECONDS
        return [
            self._result(phase, index, future, max(0.0, deadline - time.monotonic()))
            for index, future in enumerate(futures)
        ]

    def raise_failures(self, phase: str, futures: Sequence[Future[Any]]) -> None:
        """Raise for the first Future that has failed already; waits for none."""
        for index, future in enumerate(futures):
            if future.done():
                self._result(phase, index, future, 0.0)

    def ask(self, call: Callable[[InferenceEngine], T]) -> list[T | None]:
        """Call a method of every engine; None stands for those that fail or do not answer."""
        futures = self.start(call)
        deadline = time.monotonic() + self.courtesy_seconds
        answers: list[T | None] = []
        for future in futures:
            try:
                error = future.exception(max(0.0, deadline - time.monotonic()))
            except FutureTimeout:
                answers.append(None)
            else:
                answers.append(future.result() if error is None else None)
        return answers

    def _result(self, phase: str, index: int, future: Future[T], seconds: float) -> T:
        late = f"no answer within {self.timeout_seconds:g} s"
        try:
            error = future.exception(seconds)
        except FutureTimeout as unanswered:
            raise WeightSyncError(
                f"{self.label(index)}: {phase} failed: {late}. {REMEDY}"
            ) from unanswered
        if error is not None:
            said = late if isinstance(error, FutureTimeout) else (str(error) or repr(error))
            remedy = "" if isinstance(error, WeightSyncError) else f" {REMEDY}"
            raise WeightSyncError(
                f"{self.label(index)}: {phase} failed: {said.rstrip('.')}.{remedy}"
            ) from error
        return future.result()


def _run_aside(call: Callable[..., T], argument: object) -> Future[T]:
    """Call in a thread of its own.

    No pool: calls of an engine that hangs would use it up, and the interpreter waits for a pool's
    threads before it ends, which would be for as long as the engine's own time-outs last.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            result = call(argument)
        except BaseException as error:  # whoever asks for the outcome gets it
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()
    return outcome
