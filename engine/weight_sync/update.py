"""One weight update from the trainer's side: pause, send, finish, verify, continue.

    all ranks   agree on connect and pause | gather, rank 0 sends | agree on the outcome
    on failure  on_failure=raise: every rank raises; disk: `publish`, and so from then on

An engine that holds a part of an update refuses to generate until one finishes; the others go on
with what they have. So half-applied weights are never used, and the error says which engine it is.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from fsdpbench.engine.config.weight_sync import WeightUpdateMeta
from fsdpbench.engine.device import Device
from fsdpbench.engine.parallel.agreement import Agreement
from fsdpbench.engine.protocols import InferenceEngine
from fsdpbench.engine.weight_sync.buckets import MIB
from fsdpbench.engine.weight_sync.connection import XcclConnection
from fsdpbench.engine.weight_sync.digests import DigestSums, compare_digests
from fsdpbench.engine.weight_sync.fanout import Fanout
from fsdpbench.engine.weight_sync.groups import LOOPBACK
from fsdpbench.engine.weight_sync.names import name_for
from fsdpbench.engine.weight_sync.source import NamedTensor, SourceModel
from fsdpbench.engine.weight_sync.timings import PhaseClock, UpdateTimings
from fsdpbench.engine.weight_sync.traits import check_traits
from fsdpbench.errors import ConfigError, PeerError, Violation, WeightSyncError, list_names
from fsdpbench.log import get_logger

logger = get_logger(__name__)
TRAINER_FAILED = "the trainer failed"
T = TypeVar("T")
Publish = Callable[[int], Path]  # write and announce a version; collective over the trainer's ranks
NamedTensorSource = Callable[[], Iterable[NamedTensor]]


class VerificationError(WeightSyncError):
    """An engine does not hold what was sent. It stops the run: no other channel is tried."""


class UpdaterState(enum.Enum):
    """Whether the engines can be reached through the present channel."""

    APART = "apart"  # not connected, or no longer since an update failed
    CONNECTED = "connected"
    CLOSED = "closed"


class Failure(NamedTuple):
    """What every rank knows of an update that failed."""

    error: Exception  # WeightSyncError on rank 0, PeerError elsewhere
    is_final: bool  # no other channel may be tried


class WeightUpdater:
    """Carries versions of the weights to several rollout engines.

    All ranks of the trainer make one and call it alike; only rank 0 has engines and speaks to them.
    `group` serves host tensors; None means that the process is alone. `publish` is the disk
    channel. `host` is the address at which receivers on other machines reach rank 0.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        meta: WeightUpdateMeta,
        source: SourceModel,
        device: Device,
        *,
        group: dist.ProcessGroup | None = None,
        publish: Publish | None = None,
        host: str = LOOPBACK,
    ) -> None:
        self.meta, self.source, self.device = meta, source, device
        self.group, self.publish, self.host = group, publish, host
        self.leads = group is None or dist.get_rank(group) == 0
        self.mode: str = meta.type  # becomes disk once xccl has failed and may be replaced
        self.state = UpdaterState.APART
        self.receivers = Fanout(engines if self.leads else (), meta.timeout_seconds)
        self.connection: XcclConnection | None = None  # on rank 0, with xccl
        self._holds_engines = False  # they are paused, or about to be
        self._has_begun = False  # an update; before, engines may be paused for another's reasons
        self._distrusts = False  # one held other weights than were sent, and no update since

    def connect(self) -> None:
        """Check that the engines can take what is to be sent, and build the groups for xccl.

        Collective over: the trainer's ranks. Raises WeightSyncError on rank 0, PeerError elsewhere.
        """
        self._check_open()
        failure = self._lead("connecting to the rollout engines", self._connect)
        if failure is not None:
            self._fall_back(failure)

    def update(self, version: int, named_tensors: NamedTensorSource) -> UpdateTimings:
        """Carry a version to all engines; they generate with it when this returns.

        `named_tensors()` begins a walk over the whole tensors of `source`, on every rank; those of
        rank 0 are on its device. Returns the timings, the same on all ranks.
        Collective over: the trainer's ranks. Raises WeightSyncError on rank 0, PeerError elsewhere.
        """
        self._check_open()
        check_version(version)
        self._has_begun = True
        try:
            return self._carry(version, named_tensors)
        except BaseException:
            if self._holds_engines:  # an interrupt, or a rank that died, between two phases
                self._give_up(WeightSyncError(TRAINER_FAILED))
            raise

    def close(self) -> None:
        """Leave the groups; the engines go on as they are. Never raises; no communication."""
        if self.connection is not None:
            self.connection.disconnect()
            self.connection = None
            self.receivers.ask(lambda engine: engine.destroy_weights_update_group())
        self.state = UpdaterState.CLOSED

    def _check_open(self) -> None:
        if self.state is UpdaterState.CLOSED:
            raise WeightSyncError("the connection to the rollout engines was closed; connect anew")

    def _connect(self) -> None:
        engines = self.receivers.engines
        if not engines:
            raise WeightSyncError("no rollout engine was given; connect_engine needs one")
        check_traits(
            engines,
            self.meta,
            self.source,
            mode=self.mode,
            can_publish=self.publish is not None,
        )
        if self.mode == "xccl":
            connection = XcclConnection(
                self.receivers,
                self.source,
                self.device,
                bucket_bytes=self.meta.weight_chunked_mem_mb * MIB,
                host=self.host,
            )
            connection.connect()
            self.connection = connection
        self.state = UpdaterState.CONNECTED

    def _carry(self, version: int, named_tensors: NamedTensorSource) -> UpdateTimings:
        if self.mode == "xccl":
            outcome = self._send(version, named_tensors)
            if isinstance(outcome, UpdateTimings):
                return outcome
            self._fall_back(outcome)
        return self._write_and_load(version, named_tensors)

    def _send(self, version: int, named_tensors: NamedTensorSource) -> UpdateTimings | Failure:
        began = paused_at = time.perf_counter()
        clock = PhaseClock(self.device)

        def prepare() -> None:
            nonlocal paused_at
            if self.state is not UpdaterState.CONNECTED:
                self._connect()
                clock.add("connect", time.perf_counter() - began)
            paused_at = time.perf_counter()
            self._pause()

        failure = self._lead("preparing the weight update", prepare)
        if failure is not None:
            return failure
        walk = iter(named_tensors())
        timings = UpdateTimings("xccl")

        def carry() -> None:
            nonlocal timings
            assert self.connection is not None
            digests = DigestSums() if self.meta.verify else None
            self.connection.sender(clock, digests).send(walk)
            self._put_into_force(version, clock, digests)
            pause_seconds = time.perf_counter() - paused_at
            timings = UpdateTimings(
                "xccl",
                num_bytes=self.connection.num_bytes,
                num_buckets=len(self.connection.plan),
                pause_seconds=pause_seconds,
                **_fields(clock),
            )

        failure = self._lead("the weight update", carry, walk)
        return self._share(timings) if failure is None else failure

    def _write_and_load(self, version: int, named_tensors: NamedTensorSource) -> UpdateTimings:
        failure = self._lead("preparing the weight update", self._connect_again)
        if failure is not None:
            raise failure.error
        assert self.publish is not None, "check_traits has seen to it"
        began = time.perf_counter()
        clock = PhaseClock(self.device)
        folder = self.publish(version)
        clock.add("write", time.perf_counter() - began)
        digests = self._sum_up(named_tensors) if self.meta.verify else None
        timings = UpdateTimings("disk")

        def load() -> None:
            nonlocal timings
            paused_at = time.perf_counter()
            self._pause()
            loads_at = time.perf_counter()
            answers = self.receivers.begin(
                lambda _, engine: engine.update_weights_from_disk(str(folder), version)
            )
            self.receivers.collect(f"loading {folder}", answers)
            clock.add("apply", time.perf_counter() - loads_at)
            self._put_into_force(version, clock, digests)
            pause_seconds = time.perf_counter() - paused_at
            timings = UpdateTimings("disk", pause_seconds=pause_seconds, **_fields(clock))

        failure = self._lead(f"loading version {version} from disk", load)
        if failure is not None:
            raise failure.error
        return self._share(timings)

    def _connect_again(self) -> None:
        if self.state is not UpdaterState.CONNECTED:
            self._connect()

    def _sum_up(self, named_tensors: NamedTensorSource) -> DigestSums:
        """Walk through the weights for their digests, as they are after a cast to the wire dtype.

        Collective over: what the walk communicates over.
        """
        dtypes = {spec.name: getattr(torch, spec.dtype) for spec in self.source.specs}
        sums = DigestSums()
        for name, whole in named_tensors():
            if self.leads:
                sums.add(name, whole.to(dtypes[name]))
        return sums

    def _pause(self) -> None:
        in_flight = self.meta.in_flight
        self._holds_engines = True
        self.receivers.call("pausing", lambda engine: engine.pause_generation(in_flight))

    def _put_into_force(self, version: int, clock: PhaseClock, digests: DigestSums | None) -> None:
        """Finish, compare both ends, and let the engines generate again; on rank 0."""
        began = time.perf_counter()
        verifies = digests is not None
        answers = self.receivers.begin(
            lambda _, engine: engine.finish_weight_update(version, with_digests=verifies)
        )
        arrived = self.receivers.collect("finishing the update", answers)
        if digests is not None:
            self._compare(digests.collect(), arrived)
        versions = self.receivers.call("telling its version", lambda engine: engine.get_version())
        for index, found in enumerate(versions):
            if found != version:
                raise VerificationError(
                    f"{self.receivers.label(index)} has version {found} in force instead of "
                    f"{version}"
                )
        clock.add("verify" if verifies else "apply", time.perf_counter() - began)
        self.receivers.call("continuing", lambda engine: engine.continue_generation())
        self._holds_engines = self._distrusts = False

    def _compare(self, sent: dict[str, str], arrived: Sequence[object]) -> None:
        for index, there in enumerate(arrived):
            traits = self.receivers.engines[index].traits
            if not traits.gives_digests:
                continue
            assert isinstance(there, dict)
            expected = {
                name_for(traits.dialect, name, self.source.family): digest
                for name, digest in sent.items()
            }
            try:
                compare_digests(expected, there, self.receivers.label(index))
            except WeightSyncError as error:
                raise VerificationError(str(error)) from error

    def _lead(
        self, what: str, work: Callable[[], None], walk: Iterable[NamedTensor] = ()
    ) -> Failure | None:
        """Run `work` on rank 0, and walk to the end on all ranks; tell all ranks if it failed.

        Errors other than WeightSyncError end all ranks. Collective over: the trainer's ranks.
        """
        failure: Failure | None = None
        with self._agreement(what):
            try:
                if self.leads:
                    work()
            except WeightSyncError as error:
                failure = Failure(self._give_up(error), isinstance(error, VerificationError))
            except BaseException as error:  # the engines must not wait for us
                self._give_up(WeightSyncError(TRAINER_FAILED))
                if isinstance(error, Exception):  # an interrupt waits for no other rank
                    _exhaust(walk)
                raise
            _exhaust(walk)  # ranks gather together, whatever became of rank 0's sending
        said = self._share(None if failure is None else (str(failure.error), failure.is_final))
        if said is None or failure is not None:
            return failure
        return Failure(PeerError(f"{what} failed on rank 0: {said[0]}"), said[1])

    def _give_up(self, error: WeightSyncError) -> WeightSyncError:
        """Bring every engine into a state that can be trusted, and add to the error what it is."""
        self.state = UpdaterState.APART
        self._holds_engines = False
        if self.connection is not None:
            self.connection.disconnect()
            self.connection = None
        reason = str(error)
        is_final = isinstance(error, VerificationError)
        self._distrusts = self._distrusts or is_final
        may_continue = self._has_begun and not self._distrusts
        deadline = time.monotonic() + self.receivers.courtesy_seconds
        versions = self.receivers.ask(
            lambda engine: _release(engine, reason, may_continue, deadline)
        )
        if is_final:
            return error
        labels = [self.receivers.label(index) for index in range(len(versions))]
        torn = [label for label, v in zip(labels, versions, strict=True) if v is not None and v < 0]
        silent = [label for label, v in zip(labels, versions, strict=True) if v is None]
        if torn:
            reason += f" Incomplete, and refusing to generate until an update: {list_names(torn)}."
        if silent:
            reason += f" Not answering: {list_names(silent)}."
        return WeightSyncError(reason)

    def _fall_back(self, failure: Failure) -> None:
        """Change to the disk for good, or raise. Decides alike on all ranks."""
        if failure.is_final or self.mode == "disk" or self.meta.on_failure != "disk":
            raise failure.error
        if self.leads:
            logger.warning("weights go through %s from now on: %s", self.meta.path, failure.error)
        self.mode = "disk"

    def _agreement(self, what: str) -> AbstractContextManager[None]:
        return nullcontext() if self.group is None else Agreement(what, self.group)

    def _share(self, value: T) -> T:
        """Return rank 0's value on every rank. Collective over: the trainer's ranks."""
        if self.group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]


def check_version(version: int) -> None:
    """Raise ConfigError for what engines cannot tell from having no version, which is -1."""
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise ConfigError(
            [Violation("version", repr(version), "must be a whole number from 0", "count steps")]
        )


def _exhaust(walk: Iterable[NamedTensor]) -> None:
    for _ in walk:
        pass


def _release(
    engine: InferenceEngine, reason: str, may_continue: bool, deadline: float
) -> int | None:
    """Free an engine of an update that failed; return the version it has in force.

    After the deadline nothing more is asked of it: it would disturb the next update.
    """
    engine.abort_weight_update(reason)
    if time.monotonic() > deadline:
        return None
    engine.destroy_weights_update_group()
    if time.monotonic() > deadline:
        return None
    version = engine.get_version()
    if may_continue and version >= 0 and time.monotonic() <= deadline:
        engine.continue_generation()
    return version


def _fields(clock: PhaseClock) -> dict[str, Any]:
    return {f"{phase}_seconds": seconds for phase, seconds in clock.read().items()}
