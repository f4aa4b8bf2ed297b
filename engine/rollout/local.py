"""A rollout engine in a process of its own on this machine: transformers behind `InferenceEngine`.

The client's half, without torch. Tensors never pass here: weights go through the process group that
the trainer opens or through folders. A request that an update breaks off is resubmitted by
`generate` itself, from the tokens that it has.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from fsdpbench import errors
from fsdpbench.engine.rollout.child import ChildProcess
from fsdpbench.engine.rollout.generation import (
    GeneratedSequence,
    SamplingSettings,
    build_request,
)
from fsdpbench.engine.rollout.states import EngineState
from fsdpbench.engine.weight_sync.records import ReceiverTraits
from fsdpbench.errors import (
    ConfigError,
    FsdpbenchError,
    Violation,
    WeightSyncError,
    WorkerError,
)

if TYPE_CHECKING:
    from fsdpbench.engine.weight_sync.records import Bucket, GroupAddress

WORKER_MODULE = "fsdpbench.engine.rollout.local_worker"
GRACE_SECONDS = 5.0  # the other side's own time-out comes first: its error says more
KNOWN_ERRORS = ("ConfigError", "CheckpointError", "WeightSyncError", "WorkerError")


@dataclass(frozen=True)
class LocalSettings:
    """How a local rollout process is started."""

    path: str  # a Hugging Face folder
    dtype: str = "bfloat16"
    device: str = "cpu"  # or cuda, cuda:1: as this process counts its visible devices
    version: int | None = 0  # of the folder's weights; None: wait for the first update instead
    timeout_seconds: float = 300.0  # of each call, the start included
    num_threads: int | None = None  # of the CPU; None: torch's choice
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES of the process; None: as here
    title: str = "local rollout"  # what errors call it


class LocalEngine:
    """An `InferenceEngine` whose other half is a child process. Close it, or use `with`.

    It dies with this process. Every thread may call `generate`; one thread updates weights.
    """

    def __init__(self, settings: LocalSettings) -> None:
        """Start the process; calls wait until its model is there. See `launch_local_engines`."""
        check_folder(settings)
        self.settings = settings
        self._may_generate = threading.Event()
        self._group_timeout_seconds = 0.0  # of the weight-update group
        if settings.version is not None:
            self._may_generate.set()
        self._child = ChildProcess(
            WORKER_MODULE,
            settings.title,
            error_of=build_error,
            environment=build_environment(settings),
        )
        self._loading = self._call(
            "load",
            path=str(Path(settings.path).expanduser().resolve()),
            dtype=settings.dtype,
            device=settings.device,
            version=settings.version,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._child.is_alive

    @property
    def state(self) -> EngineState:
        """The engine's state, as the process says."""
        return EngineState(self._ask("describe")["state"])

    @property
    def traits(self) -> ReceiverTraits:
        """What the engine can do with weights."""
        return ReceiverTraits("local", gives_digests=True)

    def wait_until_ready(self) -> None:
        """Return when the model is loaded; raise what kept it from that."""
        self._result(self._loading)

    def close(self) -> None:
        """End the process. Never raises; open calls fail."""
        self._may_generate.set()  # who waits for the end of a pause learns of the end instead
        if self._loading.done():
            self._child.close()
        else:  # it does not listen before its modules are imported
            self._child.close(grace_seconds=0)

    def generate(
        self, prompts: Sequence[Sequence[int]], settings: SamplingSettings
    ) -> list[GeneratedSequence]:
        """Return what follows each prompt; blocks, over pauses too, each within the time-out.

        After a pause that aborts, what is unfinished goes on with the new weights; `versions` tells
        them apart token by token.
        """
        sequences = [GeneratedSequence(list(prompt)) for prompt in prompts]
        while not sequences or not all(sequence.is_finished for sequence in sequences):
            self._await_pause_end()
            unfinished = [sequence for sequence in sequences if not sequence.is_finished]
            parts = self._ask("generate", **build_request(sequences, settings))
            for sequence, part in zip(unfinished, parts, strict=True):
                sequence.extend(part)
        return sequences

    def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log p(token | tokens before it) of each token but the first, per sequence."""
        logprobs: list[list[float]] = self._ask("logprobs", sequences=[list(s) for s in sequences])
        return logprobs

    def pause_generation(self, in_flight: str = "abort") -> None:
        """Stop generating: `abort` what runs, or `wait` for it; returns when nothing runs."""
        self._may_generate.clear()
        self._ask("pause", in_flight=in_flight)

    def continue_generation(self) -> None:
        """Generate again; WeightSyncError unless the weights are those of one version."""
        self._ask("continue")
        self._may_generate.set()

    def init_weights_update_group(self, address: GroupAddress) -> Future[None]:
        """Join the group; the trainer joins meanwhile."""
        self._group_timeout_seconds = address.timeout_seconds
        return self._call_in_group("init_group", address=asdict(address))

    def update_weights_from_distributed(self, bucket: Bucket, stage: int = 0) -> Future[None]:
        """Receive and apply one bucket; the trainer broadcasts meanwhile."""
        del stage  # there is one
        return self._call_in_group("bucket", bucket=bucket.to_json())

    def rehearse_broadcast(self, num_bytes: int, repeats: int) -> Future[None]:
        """Take messages that hold no weights off the wire; the trainer broadcasts meanwhile."""
        return self._call_in_group("rehearse", num_bytes=num_bytes, repeats=repeats)

    def update_weights_from_disk(self, path: str, version: int) -> Future[None]:
        """Load a complete Hugging Face folder; a faulty one changes nothing."""
        limit = self.settings.timeout_seconds
        return self._call("disk", path=str(path), version=version, patience_seconds=limit / 2)

    def finish_weight_update(
        self, version: int, with_digests: bool = False
    ) -> Future[Mapping[str, str]]:
        """Put the new weights into force as `version`; return digests by name if asked."""
        return self._call("finish", version=version, with_digests=with_digests)

    def abort_weight_update(self, reason: str) -> None:
        """Give up an update that cannot finish. Never raises."""
        with suppress(FsdpbenchError):
            self._ask("abort", reason=reason)

    def destroy_weights_update_group(self) -> None:
        """Leave the group. Never raises."""
        with suppress(FsdpbenchError):
            self._ask("destroy_group")

    def get_version(self) -> int:
        """Return the version in force; -1 while an update is under way or was broken off."""
        version: int = self._ask("describe")["version"]
        return version

    def _call(self, name: str, **arguments: Any) -> Future[Any]:
        return self._child.call(name, self.settings.timeout_seconds, **arguments)

    def _call_in_group(self, name: str, **arguments: Any) -> Future[Any]:
        """Call what waits in the group, whose time-out is the trainer's."""
        limit = self._group_timeout_seconds + GRACE_SECONDS
        return self._child.call(name, limit, **arguments)

    def _ask(self, name: str, **arguments: Any) -> Any:
        return self._result(self._call(name, **arguments))

    def _result(self, future: Future[Any]) -> Any:
        limit = self.settings.timeout_seconds + GRACE_SECONDS  # the call's own deadline is earlier
        try:
            return future.result(limit)
        except FutureTimeout as error:
            raise WorkerError(f"{self.settings.title} did not answer in {limit:g} s") from error

    def _await_pause_end(self) -> None:
        self.wait_until_ready()
        limit = self.settings.timeout_seconds
        if self._may_generate.wait(limit):
            return
        raise WeightSyncError(
            f"{self.settings.title} has not generated for {limit:g} s: it is {self.state.value} "
            "since a pause. Finish the weight update and call continue_generation."
        )


def launch_local_engines(settings: Sequence[LocalSettings]) -> list[LocalEngine]:
    """Start processes side by side and return when all have their models; all or none."""
    with ExitStack() as stack:
        engines = [stack.enter_context(LocalEngine(one)) for one in settings]
        for engine in engines:
            engine.wait_until_ready()
        stack.pop_all()
    return engines


def check_folder(settings: LocalSettings) -> None:
    """Refuse a path that is no model before a process is started for it."""
    if not (Path(settings.path).expanduser() / "config.json").is_file():
        raise ConfigError(
            [
                Violation(
                    "path",
                    repr(settings.path),
                    "a Hugging Face folder with config.json",
                    "give the folder that the trainer's model came from",
                )
            ]
        )


def build_environment(settings: LocalSettings) -> dict[str, str]:
    """Return what the process's environment has besides this one's."""
    environment = {"TOKENIZERS_PARALLELISM": "false"}
    if settings.num_threads is not None:
        environment["OMP_NUM_THREADS"] = str(settings.num_threads)
    if settings.visible_devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = settings.visible_devices
    return environment


def build_error(name: str, text: str) -> Exception:
    """Return what the process raised as an error of ours."""
    if name in KNOWN_ERRORS:
        error: Exception = getattr(errors, name)(text)
        return error
    return WorkerError(f"the rollout process failed: {name}: {text}")
