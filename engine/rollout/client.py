"""A rollout engine that is a server of another make, reached over HTTP: vLLM or SGLang.

The client keeps what servers do not: which version is in force, and that nobody generates with
weights of two versions. It labels the server's weights with the version, too, and so notices a
server that was restarted or that another trainer has updated. It opens no port and starts no
process.

Pausing. The gate closes first, so that no request of ours leaves any more; then the server pauses;
then every request that was on its way is answered or recalled. Hence all tokens of an answer are
of the version that was in force when its request left, and what is unfinished is resubmitted from
the tokens that it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from fsdpbench.engine.rollout.channel import ServerChannel
from fsdpbench.engine.rollout.dialects import (
    Dialect,
    GenerationRequest,
    RefusalError,
    ServerCall,
    ServerFacts,
    build_seed,
)
from fsdpbench.engine.rollout.gate import RecalledError, RequestGate
from fsdpbench.engine.rollout.generation import GeneratedSequence, SamplingSettings
from fsdpbench.engine.rollout.server_settings import ServerSettings
from fsdpbench.engine.rollout.sglang_dialect import SglangDialect
from fsdpbench.engine.rollout.states import NO_VERSION, EngineState, VersionKeeper
from fsdpbench.engine.rollout.vllm_dialect import VllmDialect
from fsdpbench.engine.rollout.weight_folder import WeightInventory
from fsdpbench.engine.weight_sync.records import ReceiverTraits
from fsdpbench.errors import ConfigError, FsdpbenchError, WeightSyncError, WorkerError

if TYPE_CHECKING:
    from fsdpbench.engine.weight_sync.records import Bucket, GroupAddress

Result = TypeVar("Result")

DRAIN_SECONDS = 1.0  # after a pause, for answers that are on their way
GRACE_SECONDS = 5.0  # beyond a group's time-out: the server's own error says more than ours
MAX_EMPTY_ABORTS = 100  # of one sequence in a row, without a pause of ours
EMPTY_ABORT_SECONDS = 0.05  # until the next try


def build_dialect(settings: ServerSettings) -> Dialect:
    """Return the dialect of the settings."""
    return VllmDialect(settings.packed) if settings.dialect == "vllm" else SglangDialect()


def connect_server(settings: ServerSettings) -> HttpEngine:
    """Ask a running server what it is and return the engine. Raises WorkerError."""
    dialect = build_dialect(settings)
    title = f"{dialect.name} server {settings.url}"
    channel = ServerChannel(settings.url, title, settings.token, settings.timeout_seconds)
    try:
        facts = channel.run(_meet(channel, dialect, str(settings.version)))
    except BaseException:
        channel.close()
        raise
    return HttpEngine(settings, dialect, channel, facts)


async def _meet(channel: ServerChannel, dialect: Dialect, label: str) -> ServerFacts:
    answers = {name: await channel.ask(call) for name, call in dialect.ask_facts().items()}
    facts = dialect.read_facts(answers)
    if facts.weight_version is not None:
        await channel.ask(dialect.label_weights(label))
    return facts


class HttpEngine:
    """An `InferenceEngine` over HTTP, made by `connect_server`. Close it, or use `with`.

    Every thread may call `generate`; one thread updates weights.
    """

    def __init__(
        self, settings: ServerSettings, dialect: Dialect, channel: ServerChannel, facts: ServerFacts
    ) -> None:
        self.settings, self.dialect, self.facts = settings, dialect, facts
        self._channel = channel
        self._keeper = VersionKeeper()
        self._keeper.finish_update(settings.version)
        self._keeper.resume()
        self._gate = RequestGate()
        self._address: GroupAddress | None = None
        self._in_session = False  # buckets are on their way
        self._has_touched = False  # the update under way may have changed the weights
        self._received: set[str] = set()  # tensors of the session
        self._inventory = _read_inventory(facts.folder)  # None: not to be seen from here

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
    def state(self) -> EngineState:
        """The engine's state, as this client keeps it."""
        return self._keeper.state

    @property
    def traits(self) -> ReceiverTraits:
        """What the server can do with weights."""
        return ReceiverTraits(
            self.dialect.name,
            world_size=self.facts.world_size,
            takes_packed=self.settings.packed,
            channels=("xccl", "disk") if self.facts.takes_groups else ("disk",),
            joins_by_id=self.dialect.joins_by_id,
        )

    @property
    def num_requests(self) -> int:
        """Requests for tokens that are at the server."""
        return self._gate.num_requests

    def close(self) -> None:
        """Let the connection go; the server runs on as it is. Never raises."""
        self._channel.close()

    def generate(
        self, prompts: Sequence[Sequence[int]], settings: SamplingSettings
    ) -> list[GeneratedSequence]:
        """Return what follows each prompt; blocks, over pauses too.

        After a pause that aborts, what is unfinished goes on with the new weights; `versions` tells
        them apart token by token.
        """
        if settings.temperature not in (0.0, 1.0) and not self.facts.logprobs_follow_temperature:
            raise ConfigError(
                f"temperature={settings.temperature}: the server returns log-probs of temperature "
                "1. Start it with --logprobs-mode processed_logprobs, or use temperature 1 or 0."
            )
        if self._inventory is not None:
            self._inventory.check_ids(prompts)
        works = [
            partial(self._generate_one, index, GeneratedSequence(list(prompt)), settings)
            for index, prompt in enumerate(prompts)
        ]
        return self._channel.run(_gather(works, self.settings.max_concurrent))

    def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log p(token | tokens before it) of each token but the first, per sequence."""
        if self._inventory is not None:
            self._inventory.check_ids(sequences)
        works = [partial(self._score_one, list(tokens)) for tokens in sequences]
        return self._channel.run(_gather(works, self.settings.max_concurrent))

    def pause_generation(self, in_flight: str = "abort") -> None:
        """Stop generating: `abort` what runs, or `wait` for it; returns when nothing runs."""
        self._keeper.pause()
        self._channel.run(self._pause(in_flight))

    def continue_generation(self) -> None:
        """Generate again; WeightSyncError unless the weights are those of one version."""
        self._keeper.check_weights()
        self._channel.run(self._continue())

    def init_weights_update_group(self, address: GroupAddress) -> Future[None]:
        """Join the group; the trainer joins meanwhile."""
        return self._channel.submit(self._join_group(address))

    def update_weights_from_distributed(self, bucket: Bucket, stage: int = 0) -> Future[None]:
        """Receive and apply one bucket; the trainer broadcasts meanwhile."""
        del stage  # servers spread the buckets over their stages themselves
        return self._channel.submit(self._receive(bucket))

    def update_weights_from_disk(self, path: str, version: int) -> Future[None]:
        """Load a complete Hugging Face folder, on a file system that the server shares."""
        del version  # `finish_weight_update` puts it into force
        return self._channel.submit(self._load(str(path)))

    def finish_weight_update(
        self, version: int, *, with_digests: bool = True
    ) -> Future[Mapping[str, str]]:
        """Put the new weights into force as `version`. These servers tell no digests."""
        del with_digests
        return self._channel.submit(self._finish(version))

    def abort_weight_update(self, reason: str) -> None:
        """Give up an update that cannot finish. Never raises."""
        with suppress(FsdpbenchError):
            self._channel.run(self._abort(reason))

    def destroy_weights_update_group(self) -> None:
        """Leave the group. Never raises."""
        address, self._address = self._address, None
        if address is not None:
            with suppress(FsdpbenchError):
                self._channel.run(self._ask_all(self.dialect.leave_group(address)))

    def get_version(self) -> int:
        """Return the version in force; -1 without one, or if the server's weights are others."""
        version = self._keeper.version
        if version == NO_VERSION or self.facts.weight_version is None:
            return version
        label = self.dialect.read_label(
            self._channel.run(self._channel.ask(self.dialect.ask_label()))
        )
        return version if label == str(version) else NO_VERSION

    async def _generate_one(
        self, index: int, sequence: GeneratedSequence, settings: SamplingSettings
    ) -> GeneratedSequence:
        num_empty = 0
        while not sequence.is_finished:
            await self._gate.wait_open(self.settings.timeout_seconds)
            version = self._keeper.version
            try:
                part = await self._ask_part(index, sequence, settings)
            except RecalledError:
                continue
            sequence.extend({**part, "version": version})
            if len(sequence.tokens) == settings.max_new_tokens and not sequence.is_finished:
                sequence.finish_reason = "length"
            num_empty = 0 if part["tokens"] else num_empty + 1
            if num_empty > MAX_EMPTY_ABORTS:
                raise WorkerError(
                    f"{self._channel.title} has aborted one request {num_empty} times without a "
                    "token. Does another client pause it, or has it no room for the sequence?"
                )
            if num_empty:
                await asyncio.sleep(EMPTY_ABORT_SECONDS)
        return sequence

    async def _ask_part(
        self, index: int, sequence: GeneratedSequence, settings: SamplingSettings
    ) -> dict[str, Any]:
        num_done = len(sequence.tokens)
        request = GenerationRequest(
            self.facts.model,
            (*sequence.prompt, *sequence.tokens),
            num_done,
            build_seed(settings.seed, index, num_done),
            settings,
        )
        answer = await self._gate.carry(self._channel.ask(self.dialect.generate(request)))
        return self.dialect.read_generation(answer)

    async def _score_one(self, tokens: list[int]) -> list[float]:
        while len(tokens) > 1:
            self._keeper.check_weights()
            await self._gate.wait_open(self.settings.timeout_seconds)
            call = self.dialect.score(self.facts.model, tokens)
            try:
                answer = await self._gate.carry(self._channel.ask(call))
            except RecalledError:
                continue
            return self.dialect.read_scores(answer, tokens)
        return []

    async def _pause(self, in_flight: str) -> None:
        self._gate.shut()
        limit = self.settings.timeout_seconds
        # here and not at the server: a request on its way to it would meet the pause and stay
        if in_flight == "wait" and not await self._gate.settle(limit):
            raise WeightSyncError(
                f"{self._channel.title}: requests still run after {limit:g} s. Allow more time, or "
                "set in_flight to abort."
            )
        await self._ask_all(self.dialect.pause(in_flight))
        if not await self._gate.settle(DRAIN_SECONDS):
            await self._gate.recall()

    async def _continue(self) -> None:
        await self._ask_all(self.dialect.resume())
        self._keeper.resume()
        self._gate.open()

    async def _join_group(self, address: GroupAddress) -> None:
        if not self.facts.takes_groups:
            raise WeightSyncError(
                f"{self._channel.title} cannot join a weight-update group: "
                f"{self.facts.why_no_groups}. Or switch weight_update_mode to disk."
            )
        await self._update(
            f"joining group {address.name}", self.dialect.join_group(address), address
        )
        self._address = address

    async def _receive(self, bucket: Bucket) -> None:
        address = self._address
        if address is None:
            raise WeightSyncError(f"{self._channel.title} has joined no weight-update group yet")
        calls = self.dialect.receive_bucket(bucket, address)
        if self._inventory is not None:
            shapes = {spec.name: spec.shape for spec in bucket.specs}
            self._inventory.check_tensors(shapes, f"bucket {bucket.index}")
        self._begin_update()
        if not self._in_session:
            calls = [*self.dialect.begin_update(), *calls]
        self._in_session = self._has_touched = True
        await self._update(f"bucket {bucket.index}", calls, address)
        self._received |= {spec.name for spec in bucket.specs}

    async def _load(self, path: str) -> None:
        self._begin_update()
        # not every server survives a wrong one, and none notices a gap
        found = WeightInventory.read(Path(path))
        inventory = self._inventory or found
        inventory.check_tensors(found.shapes, path)
        inventory.check_complete(set(found.shapes), path)
        self._inventory, self._has_touched = inventory, True
        try:
            calls = self.dialect.load_folder(path, self.settings.timeout_seconds)
            await self._update(f"loading {path}", calls)
        except WeightSyncError as error:
            refused = isinstance(error.__cause__, RefusalError)
            self._has_touched = not (refused and self.dialect.restores_after_failed_load)
            raise WeightSyncError(f"{error} {self.dialect.after_failed_load}") from error.__cause__

    async def _finish(self, version: int) -> Mapping[str, str]:
        if self._keeper.state is not EngineState.UPDATING:
            raise WeightSyncError(f"{self._channel.title}: no update is under way to be finished")
        if self._in_session and self._inventory is not None:
            self._inventory.check_complete(self._received, "the buckets of the update")
        calls = self.dialect.finish_update(str(version), in_session=self._in_session)
        await self._update("finishing the update", calls)
        self._in_session = False
        self._keeper.finish_update(version)
        return {}

    async def _abort(self, reason: str) -> None:
        in_session, self._in_session = self._in_session, False
        self._keeper.give_up_update(reason, touched=self._has_touched)
        if self._keeper.state is not EngineState.BROKEN:
            return
        # The server may be stuck in the transfer, so each gets little time. The session must be
        # closed for another to open, and the label tells others what these weights are.
        for call in self.dialect.finish_update("broken", in_session=in_session):
            with suppress(WorkerError):
                await self._channel.ask(call, min(GRACE_SECONDS, self.settings.timeout_seconds))

    def _begin_update(self) -> None:
        if self._keeper.begin_update():
            self._in_session = self._has_touched = False
            self._received = set()

    async def _update(
        self, what: str, calls: Sequence[ServerCall], address: GroupAddress | None = None
    ) -> None:
        limit = address.timeout_seconds + GRACE_SECONDS if address else None
        try:
            await self._ask_all(calls, limit)
        except WorkerError as error:
            remedy = " Check the network, or switch weight_update_mode to disk." if address else ""
            raise WeightSyncError(f"{what}: {error}{remedy}") from error

    async def _ask_all(self, calls: Sequence[ServerCall], limit: float | None = None) -> None:
        for call in calls:
            failure = self.dialect.read_failure(await self._channel.ask(call, limit))
            if failure is not None:
                raise RefusalError(f"{self._channel.title}: {call.path}: {failure}")


def _read_inventory(folder: str) -> WeightInventory | None:
    """Return what the server began with, where that is a folder seen from here."""
    with suppress(WeightSyncError):
        return WeightInventory.read(Path(folder))
    return None


async def _gather(
    works: Sequence[Callable[[], Awaitable[Result]]], max_concurrent: int
) -> list[Result]:
    """Do all works, so many at a time; the first that fails ends the others."""
    slots = asyncio.Semaphore(max_concurrent)

    async def do(work: Callable[[], Awaitable[Result]]) -> Result:
        async with slots:
            return await work()

    tasks = [asyncio.ensure_future(do(work)) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
