"""A pool of worker processes that every distributed test shares.

Importing torch and transformers costs seconds, so workers live as long as the test run; each call
gets a fresh default process group over the first `world_size` of them. A call that fails or
outlives its time limit ends the workers it used (a peer may be stuck in a collective); the next
call starts new ones.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

READY = "ready"
START_SECONDS = 240  # importing torch and transformers on a machine that is busy
MAX_DESCRIPTORS = 64  # of an idle worker; a group has about eight
STACKS_SECONDS = 0.5  # for a worker that does not answer to write where it stands


def serve(connection: Connection, stacks: str) -> None:
    """Run jobs in a worker process until the pipe closes."""
    faulthandler.register(signal.SIGUSR2, Path(stacks).open("w"))  # noqa: SIM115  # open to the end
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    importlib.import_module("fsdpbench.engine.fsdp_engine")  # with torch and transformers
    connection.send(READY)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, run_job(**job)))
        except BaseException as error:  # the boundary: the test process raises what is sent here
            connection.send((False, f"{error!r}\n{traceback.format_exc()}"))


def run_job(
    target: str,
    rank: int,
    world_size: int,
    store: str,
    device_type: str,
    timeout_seconds: float,
    kwargs: dict[str, Any],
) -> Any:
    """Call one payload inside a fresh default process group."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    backend = "gloo"
    if device_type == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    module_name, _, function_name = target.partition(":")
    payload = getattr(importlib.import_module(module_name), function_name)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )
    try:
        dist.barrier()  # a payload that ends at once must not close a peer's half-made connection
        return payload(rank, world_size, **kwargs)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        if len(list(Path("/proc/self/fd").iterdir())) > MAX_DESCRIPTORS:
            release_all_groups()


def release_all_groups() -> None:
    """Free the groups of meshes that payloads left behind: their threads take time from all."""
    from torch.distributed.device_mesh import DeviceMesh

    from fsdpbench.engine.parallel.mesh import release_groups

    gc.collect()
    for one in gc.get_objects():
        if type(one) is DeviceMesh:
            release_groups(one)


class Worker:
    """One process of the pool and the pipe to it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, child = context.Pipe()
        self.stacks = tempfile.NamedTemporaryFile(prefix="fsdpbench-pool-")  # noqa: SIM115
        arguments = (child, self.stacks.name)
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        child.close()

    def read_stacks(self) -> str:
        """Return the stacks of a worker that does not answer."""
        os.kill(self.process.pid, signal.SIGUSR2)
        time.sleep(STACKS_SECONDS)
        return self.stacks.read().decode()

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.stacks.close()


class WorkerPool:
    """Workers by rank, started when first needed."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.deaths: list[int | None] = []  # exit codes of workers that died between calls

    def run(
        self,
        target: str,
        world_size: int,
        *,
        timeout_seconds: float,
        device_type: str,
        kwargs: dict[str, Any],
    ) -> list[Any]:
        self._bury_the_dead()
        started = [Worker() for _ in range(world_size - len(self.workers))]
        self.workers += started
        for worker in started:  # so that a time limit counts the payload alone
            if not worker.connection.poll(START_SECONDS):
                self.close()  # nobody may take its late answer for that of another call
                raise AssertionError("a worker does not start")
            assert worker.connection.recv() == READY
        with tempfile.TemporaryDirectory(prefix="fsdpbench-pool-") as folder:
            for rank in range(world_size):
                self.workers[rank].connection.send(
                    {
                        "target": target,
                        "rank": rank,
                        "world_size": world_size,
                        "store": str(Path(folder) / "store"),
                        "device_type": device_type,
                        "timeout_seconds": timeout_seconds,
                        "kwargs": kwargs,
                    }
                )
            return self._collect(target, world_size, timeout_seconds)

    def _collect(self, target: str, world_size: int, timeout_seconds: float) -> list[Any]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        ranks = {self.workers[rank].connection: rank for rank in range(world_size)}
        deadline = time.monotonic() + timeout_seconds
        grace_ends = None  # after a first error, peers may report theirs before they are ended
        while ranks:
            limit = deadline if grace_ends is None else min(deadline, grace_ends)
            ready = wait(list(ranks), timeout=max(0.0, limit - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = ranks.pop(connection)
                try:
                    ok, value = connection.recv()
                except (EOFError, OSError):
                    ok, value = False, "the worker process died"
                if ok:
                    results[rank] = value
                else:
                    errors[rank] = value
                    grace_ends = grace_ends or time.monotonic() + 2.0
        if ranks or errors:
            unanswered = sorted(ranks.values())
            errors |= {rank: self.workers[rank].read_stacks() for rank in unanswered}
            self._discard(world_size)
            report = "\n".join(f"--- rank {rank}: {text}" for rank, text in sorted(errors.items()))
            message = (
                f"{target} on {world_size} ranks failed; no answer from {unanswered}\n{report}"
            )
            raise AssertionError(message)
        return [results[rank] for rank in range(world_size)]

    def _bury_the_dead(self) -> None:
        """Drop workers that died after their last call; the run's summary tells of them."""
        dead = [worker for worker in self.workers if not worker.process.is_alive()]
        for worker in dead:
            self.deaths.append(worker.process.exitcode)
            worker.stop()
        self.workers = [worker for worker in self.workers if worker not in dead]

    def _discard(self, world_size: int) -> None:
        for worker in self.workers[:world_size]:
            worker.stop()
        self.workers = self.workers[world_size:]

    def close(self) -> None:
        for worker in self.workers:
            worker.stop()
        self.workers = []


def list_deaths() -> list[int | None]:
    """Return the exit codes of workers that died between calls, negative for a signal."""
    return list(_pool.deaths)


_pool = WorkerPool()
atexit.register(_pool.close)


def run_on_ranks(
    target: str,
    world_size: int,
    *,
    timeout_seconds: float = 240,
    device_type: str = "cpu",
    **kwargs: Any,
) -> list[Any]:
    """Run `module:function`(rank, world_size, **kwargs) on every rank; return the results by rank.

    Raises AssertionError with every rank's traceback if one fails or does not answer in time.
    """
    return _pool.run(
        target,
        world_size,
        timeout_seconds=timeout_seconds,
        device_type=device_type,
        kwargs=kwargs,
    )
