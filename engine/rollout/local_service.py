"""What a local rollout process does with the messages that it gets.

Two threads. `receive` runs in the one that reads messages: it answers at once what must not wait
(state, pause, abort) and queues the rest. `run` is the main thread's loop: it owns the model and
works the queue off in order, so an answer to a queued pause means that nothing runs any more.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fsdpbench.engine.device import Device
from fsdpbench.engine.rollout.generation import SamplingSettings
from fsdpbench.engine.rollout.local_model import LocalModel, build_local_model
from fsdpbench.engine.rollout.states import EngineState, VersionKeeper
from fsdpbench.engine.weight_sync.digests import compute_digests
from fsdpbench.engine.weight_sync.disk import await_version
from fsdpbench.engine.weight_sync.groups import WeightGroup
from fsdpbench.engine.weight_sync.receiver import BucketReceiver, ReceiverState
from fsdpbench.engine.weight_sync.records import Bucket, GroupAddress
from fsdpbench.errors import CheckpointError, FsdpbenchError, WeightSyncError

# what a call may fail with; anything else is a fault of ours and ends the process with a traceback
CALL_ERRORS = (FsdpbenchError, OSError, RuntimeError, ValueError, MemoryError)

Message = Mapping[str, Any]


class LocalService:
    """The state of one local rollout process; `send` carries an answer back, from any thread."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._jobs: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._keeper = VersionKeeper()
        self._interrupted = threading.Event()  # generations end where they are
        self._group: WeightGroup | None = None  # also while it is being joined
        self._model: LocalModel | None = None
        self._receiver: BucketReceiver | None = None
        self._num_steps = 0  # of the generation that runs; 0 if none does
        self._loaded_from_disk = False  # the update under way came as a folder, whole
        self._at_once: dict[str, Callable[..., Any]] = {
            "describe": self._describe,
            "continue": self._continue,
        }
        self._queued: dict[str, Callable[..., Any]] = {
            "load": self._load,
            "pause": self._report_paused,
            "generate": self._generate,
            "logprobs": self._compute_logprobs,
            "init_group": self._init_group,
            "bucket": self._receive_bucket,
            "rehearse": self._rehearse,
            "disk": self._load_from_disk,
            "finish": self._finish,
            "abort": self._abort,
            "destroy_group": self._destroy_group,
        }

    def receive(self, message: Message) -> None:
        """Take one message, in the thread that reads them."""
        call = message["call"]
        if call in self._at_once:
            self._answer(message, self._at_once[call])
            return
        if call == "generate" and self._keeper.state is not EngineState.READY:
            self._answer(message, self._return_unchanged)
            return
        if call == "pause":
            self._keeper.pause()
            if message["arguments"]["in_flight"] == "abort":
                self._interrupted.set()
        elif call == "abort" and self._group is not None:
            self._group.abort()  # the main thread may be waiting in it
        self._jobs.put(message)

    def stop(self) -> None:
        """End `run` after the jobs that are queued."""
        self._jobs.put(None)

    def run(self) -> None:
        """Work off jobs until `stop`, in the main thread."""
        while (message := self._jobs.get()) is not None:
            self._answer(message, self._queued[message["call"]])

    def _answer(self, message: Message, call: Callable[..., Any]) -> None:
        try:
            answer = {"result": call(**message["arguments"])}
        except CALL_ERRORS as error:  # the boundary: the caller raises it
            answer = {"error": type(error).__name__, "text": str(error)}
        self._send({"id": message["id"], **answer})

    def _describe(self) -> dict[str, Any]:
        return {
            "state": self._keeper.state.value,
            "version": self._keeper.version,
            "num_steps": self._num_steps,
        }

    def _continue(self) -> None:
        self._keeper.resume()
        self._interrupted.clear()

    def _report_paused(self, in_flight: str) -> str:
        del in_flight  # heeded when the message came
        return self._keeper.state.value

    def _load(self, path: str, dtype: str, device: str, version: int | None) -> dict[str, Any]:
        """Build the model; read the folder's weights as `version`, or leave them out for None."""
        kind, _, index = device.partition(":")
        where = Device(kind, None if kind == "cpu" else int(index or 0))
        where.make_current()
        model = build_local_model(Path(path), dtype, where)
        if version is not None:
            model.plan_load(Path(path))()
            self._keeper.finish_update(version)
            self._keeper.resume()
        self._model = model
        self._receiver = BucketReceiver(model.live, where, model.aliases)
        return {"num_tensors": len(model.live)}

    def _generate(self, sequences: list[Message], settings: Message) -> list[dict[str, Any]]:
        self._keeper.check_weights()
        version = self._keeper.version
        model, _ = self._parts()
        chosen = SamplingSettings.from_json(settings)
        try:
            parts = model.generate(sequences, chosen, self._must_stop)
        finally:
            self._num_steps = 0
        return [{**part, "version": version} for part in parts]

    def _return_unchanged(self, sequences: list[Message], settings: Message) -> list[Message]:
        """Answer a request that came during a pause; it is to come again after it."""
        del settings
        nothing = {"tokens": [], "logprobs": [], "finish_reason": "abort"}
        return [{**nothing, "version": self._keeper.version} for _ in sequences]

    def _must_stop(self) -> bool:
        self._num_steps += 1  # asked before each step
        return self._interrupted.is_set()

    def _compute_logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        self._keeper.check_weights()
        return self._parts()[0].compute_logprobs(sequences)

    def _init_group(self, address: Message) -> None:
        model, receiver = self._parts()
        self._destroy_group()
        self._group = WeightGroup.enter(GroupAddress(**address), model.device)
        self._group.join()
        receiver.attach(self._group)

    def _destroy_group(self) -> None:
        self._parts()[1].detach()
        self._group = None

    def _receive_bucket(self, bucket: Message) -> None:
        _, receiver = self._parts()
        arriving = Bucket.from_json(bucket)
        if self._keeper.begin_update() or arriving.index == 0:
            receiver.arrived.clear()  # of an update whose sender has gone
        self._loaded_from_disk = False
        try:
            receiver.receive(arriving)
        except CALL_ERRORS as error:
            self._give_up(str(error), touched=receiver.state is ReceiverState.PARTIAL)
            raise

    def _rehearse(self, num_bytes: int, repeats: int) -> None:
        self._parts()[1].rehearse(num_bytes, repeats)

    def _load_from_disk(self, path: str, version: int, patience_seconds: float) -> None:
        model, _ = self._parts()
        folder = Path(path)
        await_version(folder, patience_seconds, version)
        load = model.plan_load(folder)  # what is wrong with the files shows before any change
        self._keeper.begin_update()
        self._loaded_from_disk = False
        try:
            load()
        except CALL_ERRORS as error:
            self._give_up(str(error), touched=True)
            raise
        self._loaded_from_disk = True

    def _finish(self, version: int, with_digests: bool) -> dict[str, str]:
        model, receiver = self._parts()
        if self._keeper.state is not EngineState.UPDATING:
            raise WeightSyncError(
                f"version {version} cannot be put into force: no weights of it have arrived"
            )
        if self._loaded_from_disk:
            digests = compute_digests(model.live.items()) if with_digests else {}
            self._destroy_group()  # nothing is left of an update through it
            self._receiver = BucketReceiver(model.live, model.device, model.aliases)
        else:
            digests = receiver.finish(with_digests=with_digests)
        self._keeper.finish_update(version)
        return digests

    def _abort(self, reason: str) -> None:
        _, receiver = self._parts()
        touched = self._loaded_from_disk or receiver.state is ReceiverState.PARTIAL
        self._give_up(reason, touched)

    def _give_up(self, reason: str, touched: bool) -> None:
        self._parts()[1].abandon()
        self._group = None
        self._keeper.give_up_update(reason, touched=touched)

    def _parts(self) -> tuple[LocalModel, BucketReceiver]:
        if self._model is None or self._receiver is None:
            raise CheckpointError("no model is loaded")
        return self._model, self._receiver
