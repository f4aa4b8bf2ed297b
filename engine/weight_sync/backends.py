"""Stores and backends of weight-update groups: torch's own, built without its default world.

`init_process_group` would enter a group into torch's world of the process, where there is one
default. The classes are public; their type stubs are not complete, so that they are `Any` here.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist

from fsdpbench.engine.weight_sync.records import GroupAddress
from fsdpbench.errors import WeightSyncError

# NCCL's own time-out ends the process, so it must come long after ours.
NCCL_PATIENCE = 10.0

# Under this key a ProcessGroupNCCL of at most 128 ranks tells its members the raw id of its first
# communicator (`ProcessGroupNCCL::broadcastUniqueNCCLID`); torch does not document it.
NCCL_ID_KEY = "0"
MAX_ID_RANKS = 128

# The trainer has accepted a connection before; it may give up, or stop, just as we come.
CONNECT_SECONDS = 5.0

torch_distributed: Any = dist
Store: TypeAlias = Any  # dist.TCPStore


def open_store(address: GroupAddress, listener_fd: int | None = None) -> Store:
    """Open the group's key-value store: as its server behind a bound socket, or as a client.

    The store owns the descriptor from here on. Raises WeightSyncError.
    """
    limit = address.timeout_seconds
    if listener_fd is not None:
        outcome = _run_aside(lambda: _build_store(address, limit, master_listen_fd=listener_fd))
    else:
        limit = min(limit, CONNECT_SECONDS)
        outcome = _run_aside(lambda: _build_store(address, limit))
    try:
        store = outcome.result(limit)
        store.set_timeout(timedelta(seconds=address.timeout_seconds))
    except (RuntimeError, FutureTimeout) as error:
        said = "no answer" if isinstance(error, FutureTimeout) else error
        raise WeightSyncError(
            f"group {address.name}: no store at {address.host}:{address.port} ({said})"
        ) from error
    return store


def _build_store(address: GroupAddress, seconds: float, **options: int) -> Store:
    return torch_distributed.TCPStore(
        address.host,
        address.port,
        is_master=bool(options),
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        **options,
    )


def _run_aside(build: Callable[[], Store]) -> Future[Store]:
    """Build a store in a thread: torch waits for ever for a server that accepts and is silent."""
    outcome: Future[Store] = Future()

    def run() -> None:
        try:
            outcome.set_result(build())
        except RuntimeError as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="weight-group-store", daemon=True).start()
    return outcome


def prefixed_store(address: GroupAddress, store: Store) -> Store:
    """Return the part of the group's store that its backend writes to.

    Keys have the prefixes that `init_process_group` gives them for a group of this name.
    """
    kind = "cpu/" if address.backend == "gloo" else "cuda/"
    for prefix in (address.name, f"{address.name}/", kind):
        store = torch_distributed.PrefixStore(prefix, store)
    return store


def build_backend(address: GroupAddress, rank: int, store: Store) -> Any:
    """Build the process group of one member; gloo connects here, NCCL in its first collective.

    Collective over: the group.
    """
    size, own = address.world_size, prefixed_store(address, store)
    if address.backend == "gloo":
        gloo = torch_distributed.ProcessGroupGloo
        options = gloo._Options()
        # torch's default asks the host's name, which may lead to a public interface or to none
        options._devices = [gloo.create_device(hostname=find_local_address(address))]
        options._timeout = timedelta(seconds=address.timeout_seconds)
        return gloo(own, rank, size, options)
    nccl = torch_distributed.ProcessGroupNCCL
    options = nccl.Options()
    options.is_high_priority_stream = False
    options._timeout = timedelta(seconds=address.timeout_seconds * NCCL_PATIENCE)
    with errors_left_to_us():
        return nccl(own, rank, size, options)


def find_local_address(address: GroupAddress) -> str:
    """Return the address of this machine from which the trainer's is reached; sends nothing."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address.host, address.port))
        name: str = probe.getsockname()[0]
        return name


@contextlib.contextmanager
def errors_left_to_us() -> Iterator[None]:
    """Keep NCCL's watchdog from ending the process over a group; its constructor reads it."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
