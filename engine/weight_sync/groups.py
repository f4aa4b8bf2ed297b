"""The process group between the trainer's rank 0 and the ranks of the rollout side.

Its own, outside torch's default world, which the two sides do not share. The trainer binds a port
of the system's choice and then tells it, so no port can be lost in between:

    trainer:  group = WeightGroup.listen("weights", world_size=3, device=device, ...)
              send group.address_for(first_rank) to each receiver;  group.join()
    receiver: group = WeightGroup.enter(address, device);  group.join()
    both:     group.broadcast(tensor).wait()  ...  group.close()

Store prefixes and backend are those of `init_process_group` as SGLang calls it for a group of this
name, so that its servers can join, too; they do not greet (`GroupAddress.greets`). vLLM's join by
the raw id of the NCCL communicator, which `mint_id` puts into the address. Every wait ends at the
time-out; `abort` from another thread ends it at once.
"""

from __future__ import annotations

import base64
import contextlib
import enum
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import Any, Self

import torch
import torch.distributed as dist

from fsdpbench.engine.device import Device
from fsdpbench.engine.weight_sync.backends import (
    MAX_ID_RANKS,
    NCCL_ID_KEY,
    Store,
    build_backend,
    open_store,
    prefixed_store,
)
from fsdpbench.engine.weight_sync.records import GroupAddress
from fsdpbench.errors import WeightSyncError, list_names

LOOPBACK = "127.0.0.1"
POLL_SECONDS = 1e-4  # while a transfer runs: fine beside the tens of ms that one takes
GREETING_POLL_SECONDS = 0.01

Check = Callable[[], None]


class GroupTimeoutError(WeightSyncError):
    """A wait in a group lasted too long."""


class GroupState(enum.Enum):
    """What a group can do now."""

    OPEN = "open"  # the store stands, members are on their way
    JOINED = "joined"
    CLOSED = "closed"  # closed or aborted


class PendingBroadcast:
    """A broadcast that is under way; it holds the tensor until it is done."""

    def __init__(self, group: WeightGroup, work: Any, tensor: torch.Tensor) -> None:
        self.group, self.work = group, work
        self.tensor = tensor  # the backend reads or writes it until `wait` returns
        self.ended_at: float | None = None  # perf_counter; on the CPU alone
        if group.address.backend == "gloo":
            work.get_future().then(self._note_end)

    def wait(self, check: Check | None = None) -> None:
        """Block until the bytes have passed; then the current stream may use the tensor.

        `check` is called now and then and may raise to give up. Raises WeightSyncError.
        """
        self.group.wait_until(self.work.is_completed, "the broadcast", POLL_SECONDS, check)
        with self.group.errors_named("the broadcast"):
            self.work.wait()

    def _note_end(self, _future: Any) -> None:
        self.ended_at = time.perf_counter()


class WeightGroup:
    """A member of one weight-update group; rank 0 is the trainer and the source.

    Collective over: the group, in `join` and `broadcast`.
    """

    def __init__(self, address: GroupAddress, rank: int, device: Device, store: Store) -> None:
        self.address, self.rank, self.device = address, rank, device
        self.state = GroupState.OPEN
        self.is_connected = False  # NCCL connects in its first collective
        self._store: Store | None = store
        self._backend: Any = None  # ProcessGroupNCCL is absent from builds without CUDA
        self._works: list[Any] = []  # handles of broadcasts that may still run
        self._greeting: Future[Any] | None = None  # of receivers that join by id
        self._lock = threading.Lock()  # of the state and its objects: `abort` comes at any time

    @classmethod
    def listen(
        cls,
        name: str,
        world_size: int,
        device: Device,
        timeout_seconds: float,
        *,
        host: str = LOOPBACK,
        stage: int = 0,
        greets: bool = True,
    ) -> Self:
        """Bind a free port of `host` as the trainer. Receivers may come from now on."""
        try:
            listener = socket.create_server((host, 0), backlog=max(128, world_size))
        except OSError as error:
            raise WeightSyncError(
                f"group {name}: no port of {host} can be bound ({error}). Give an address of this "
                "machine that the receivers reach."
            ) from error
        port = listener.getsockname()[1]
        backend = "gloo" if device.type == "cpu" else "nccl"
        address = GroupAddress(
            host, port, name, world_size, 1, backend, timeout_seconds, stage, greets
        )
        # the store owns the descriptor from here on
        return cls(address, 0, device, open_store(address, listener.detach()))

    @classmethod
    def enter(cls, address: GroupAddress, device: Device, offset: int = 0) -> Self:
        """Reach the trainer's store as the receiver's rank number `offset`."""
        rank = address.first_rank + offset
        if not 0 < rank < address.world_size:
            raise WeightSyncError(
                f"group {address.name}: rank {rank} is outside 1..{address.world_size - 1}; the "
                "receiver has more ranks than it told the trainer. Start it with the parallel "
                "degrees of its backend setting."
            )
        if (address.backend == "gloo") != (device.type == "cpu"):
            raise WeightSyncError(
                f"group {address.name}: the trainer uses {address.backend}, which does not serve "
                f"the receiver's {device.type}. Run both on one kind, or switch "
                "weight_update_mode to disk."
            )
        try:  # torch's store would retry a refused connection for twice the time-out
            socket.create_connection((address.host, address.port), address.timeout_seconds).close()
        except OSError as error:
            raise WeightSyncError(
                f"group {address.name}: {address.host}:{address.port} cannot be reached ({error})."
                " Check the network and its firewall, or switch weight_update_mode to disk."
            ) from error
        return cls(address, rank, device, open_store(address))

    def address_for(self, first_rank: int) -> GroupAddress:
        """Return what the receiver whose ranks begin at `first_rank` needs to know."""
        return replace(self.address, first_rank=first_rank)

    def mint_id(self) -> None:
        """Put the id of the NCCL communicator into the address, for receivers that join by it.

        As the trainer, before they hear of the group. A receiver that has joined so sums up one
        float32 with all members first (`PyNcclCommunicator`), which begins here. Raises
        WeightSyncError.
        """
        if self.address.backend != "nccl" or self.address.world_size > MAX_ID_RANKS:
            raise WeightSyncError(
                f"group {self.address.name}: {self.address.world_size} ranks over "
                f"{self.address.backend} cannot join by an NCCL id; it needs GPUs and at most "
                f"{MAX_ID_RANKS} ranks. Switch weight_update_mode to disk."
            )
        own = prefixed_store(self.address, self._live_store())
        backend = self._build_backend()
        ones = torch.ones(1, device=self.device.torch_device)
        self._greeting = self._run_aside(lambda: backend.allreduce([ones]))
        with self.errors_named("minting an NCCL id"):
            self.wait_until(
                lambda: own.check([NCCL_ID_KEY]), "minting an NCCL id", GREETING_POLL_SECONDS
            )
            unique_id = base64.b64encode(own.get(NCCL_ID_KEY)).decode()
        self.address = replace(self.address, unique_id=unique_id)

    def join(self, check: Check | None = None) -> None:
        """Wait for all members and connect to them. Raises WeightSyncError.

        Members that greet tell of themselves through the store first: who is missing is then known
        by rank, and nobody connects to half a group. `check` is called now and then and may raise.
        """
        if self._greeting is not None:
            self._await_greeting(self._greeting, check)
            return
        if self.address.greets:
            self._greet(check)
        self._build_backend()
        if self.address.greets:  # NCCL connects here and not within the first, timed update
            token = torch.zeros(1, dtype=torch.uint8, device=self.device.torch_device)
            self.broadcast(token).wait(check)

    def broadcast(self, tensor: torch.Tensor) -> PendingBroadcast:
        """Begin to carry a contiguous tensor's bytes from rank 0 to all; it must not change.

        On CUDA it begins after what the current stream holds.
        """
        backend = self._backend
        if backend is None:
            raise WeightSyncError(f"group {self.address.name} is {self.state.value}; connect anew")
        flat = tensor.view(-1).view(torch.uint8)
        with self.errors_named("the broadcast"):
            work = self._launch(backend, flat)
        with self._lock:
            is_open = self.state is GroupState.JOINED
            if is_open:
                self._works = [one for one in self._works if not one.is_completed()] + [work]
        if not is_open:  # `abort` came meanwhile and knew nothing of this work
            _release(backend, [work])
            raise WeightSyncError(f"group {self.address.name}: the broadcast was aborted")
        return PendingBroadcast(self, work, tensor)

    def abort(self) -> None:
        """End the group at once, also for threads that wait in it. Never raises."""
        with self._lock:
            self.state = GroupState.CLOSED
            backend, self._backend = self._backend, None
            works, self._works = self._works, []
            self._store = None
        if backend is None:
            return
        with contextlib.suppress(RuntimeError):  # a backend that cannot: closed with the object
            backend.abort()
        _release(backend, works)

    def close(self) -> None:
        """Leave the group; all its broadcasts must be done. Never raises."""
        backend = self._backend
        if backend is not None and self.address.backend == "nccl":
            with contextlib.suppress(RuntimeError):
                backend.shutdown()
            self._backend = None
        self.abort()

    def wait_until(
        self,
        is_done: Callable[[], bool],
        what: str,
        poll_seconds: float,
        check: Check | None = None,
    ) -> None:
        """Poll until `is_done`; raise WeightSyncError at the time-out or after `abort`."""
        deadline = time.monotonic() + self.address.timeout_seconds
        while not is_done():
            if self.state is GroupState.CLOSED:
                raise WeightSyncError(f"group {self.address.name}: {what} was aborted")
            if check is not None:
                check()
            if time.monotonic() > deadline:
                raise GroupTimeoutError(self._late(what))
            time.sleep(poll_seconds)

    @contextlib.contextmanager
    def errors_named(self, what: str) -> Iterator[None]:
        """Turn the backend's errors into WeightSyncError; they are RuntimeErrors."""
        try:
            yield
        except RuntimeError as error:
            lines = str(error).splitlines() or [type(error).__name__]
            raise WeightSyncError(
                f"group {self.address.name}, rank {self.rank}: {what} failed: {lines[0]}. See the "
                "log of the other side; check the network, or switch weight_update_mode to disk."
            ) from error

    def _late(self, what: str) -> str:
        return (
            f"group {self.address.name}, rank {self.rank}: {what} did not end within "
            f"{self.address.timeout_seconds:g} s. A member is missing, dead or stuck: check the "
            "network and the port, raise timeout_seconds, or switch weight_update_mode to disk."
        )

    def _build_backend(self) -> Any:
        store = self._live_store()
        with self.errors_named("joining"):
            backend = build_backend(self.address, self.rank, store)
        with self._lock:
            if self.state is not GroupState.CLOSED:
                self._backend, self.state = backend, GroupState.JOINED
        return backend

    def _await_greeting(self, greeting: Future[Any], check: Check | None) -> None:
        """Wait until all have connected by the id, and for the sum that they begin with."""
        self.wait_until(greeting.done, "joining", GREETING_POLL_SECONDS, check)
        with self.errors_named("joining"):
            work = greeting.result()
            self.wait_until(work.is_completed, "joining", GREETING_POLL_SECONDS, check)
            work.wait()
        self._live_store()  # `abort` ends the sum, too
        self.is_connected = True

    def _greet(self, check: Check | None) -> None:
        store = self._live_store()
        with self.errors_named("joining"):
            if self.rank == 0:
                self._await_receivers(store, check)
            else:
                self._report_to_trainer(store, check)

    def _await_receivers(self, store: Store, check: Check | None) -> None:
        missing = list(range(1, self.address.world_size))

        def all_came() -> bool:
            missing[:] = [rank for rank in missing if not store.check([f"here/{rank}"])]
            return not missing

        answer = "the trainer gave up"
        try:
            self.wait_until(all_came, "joining", GREETING_POLL_SECONDS, check)
            answer = "ok"
        except GroupTimeoutError as error:
            ranks = list_names(str(rank) for rank in missing)
            answer = f"{error} Missing ranks: {ranks}."
            raise WeightSyncError(answer) from error
        except WeightSyncError as error:
            answer = str(error)
            raise
        finally:
            store.set("answer", answer)

    def _report_to_trainer(self, store: Store, check: Check | None) -> None:
        if store.add(f"here/{self.rank}", 1) > 1:
            raise WeightSyncError(
                f"group {self.address.name}: rank {self.rank} is taken by another receiver"
            )
        self.wait_until(lambda: store.check(["answer"]), "joining", GREETING_POLL_SECONDS, check)
        answer = store.get("answer").decode()
        if answer != "ok":
            raise WeightSyncError(f"the trainer did not open the group: {answer}")

    def _live_store(self) -> Store:
        store = self._store
        if store is None:
            raise WeightSyncError(f"group {self.address.name}: joining was aborted")
        return store

    def _launch(self, backend: Any, flat: torch.Tensor) -> Any:
        """Issue the broadcast; the first of NCCL waits on the host for all members to connect."""
        if self.is_connected or self.address.backend == "gloo":
            return backend.broadcast([flat], dist.BroadcastOptions())
        outcome = self._run_aside(lambda: backend.broadcast([flat], dist.BroadcastOptions()))
        try:
            work = outcome.result(self.address.timeout_seconds)
        except FutureTimeout as error:
            raise GroupTimeoutError(self._late("connecting")) from error
        self.is_connected = True
        return work

    def _run_aside(self, collective: Callable[[], Any]) -> Future[Any]:
        """Issue NCCL's first collective in a thread, on what is the current stream here.

        Nothing can end its wait for the members, so it must not keep the process alive.
        """
        stream = self.device.current_stream()
        outcome: Future[Any] = Future()

        def connect() -> None:
            self.device.make_current()
            with self.device.use_stream(stream):
                try:
                    outcome.set_result(collective())
                except RuntimeError as error:
                    outcome.set_exception(error)

        threading.Thread(target=connect, name="weight-group-connect", daemon=True).start()
        return outcome


def _release(backend: Any, works: list[Any]) -> None:
    """Let go of a backend, but not before its works have ended.

    gloo's destructor waits for its transfers and holds the interpreter's lock meanwhile. They end
    as soon as a peer closes, or at the time-out.
    """
    if not all(work.is_completed() for work in works):
        threading.Thread(target=_hold, args=(backend, works), daemon=True).start()


def _hold(backend: Any, works: list[Any]) -> None:
    """Keep a backend until its works have ended."""
    while not all(work.is_completed() for work in works):
        time.sleep(GREETING_POLL_SECONDS)
    del backend
