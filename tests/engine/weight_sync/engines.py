"""Rollout engines that answer from a table, for what has no wire."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from fsdpbench.engine.weight_sync.records import ReceiverTraits


def done(value: Any = None) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def failed(error: BaseException) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


class TableEngine:
    """Notes every call; what `answers` holds under a method's name is returned, or raised."""

    def __init__(self, traits: ReceiverTraits | None = None, **answers: Any) -> None:
        self.traits = traits or ReceiverTraits("local", gives_digests=True)
        self.answers = answers
        self.calls: list[str] = []

    def _answer(self, name: str, default: Any = None) -> Any:
        self.calls.append(name)
        answer = self.answers.get(name, default)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def pause_generation(self, in_flight: str = "abort") -> None:
        self._answer("pause_generation")

    def continue_generation(self) -> None:
        self._answer("continue_generation")

    def init_weights_update_group(self, address: Any) -> Future[None]:
        return done(self._answer("init_weights_update_group"))

    def update_weights_from_distributed(self, bucket: Any, stage: int = 0) -> Future[None]:
        return done(self._answer("update_weights_from_distributed"))

    def update_weights_from_disk(self, path: str, version: int) -> Future[None]:
        return done(self._answer("update_weights_from_disk"))

    def finish_weight_update(self, version: int, with_digests: bool = False) -> Future[Any]:
        return done(self._answer("finish_weight_update", {}))

    def abort_weight_update(self, reason: str) -> None:
        self._answer("abort_weight_update")

    def destroy_weights_update_group(self) -> None:
        self._answer("destroy_weights_update_group")

    def get_version(self) -> int:
        return self._answer("get_version", 1)
