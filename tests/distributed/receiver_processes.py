"""Receiving ends in forked processes: the real BucketReceiver under a stand-in for the rest.

A fork of the test's worker costs milliseconds, so that a receiver may die. Only the plain tensors
and groups of the child are used there; it never computes with a model.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file, save_file

from fsdpbench.engine.device import Device
from fsdpbench.engine.weight_sync.digests import compute_digests
from fsdpbench.engine.weight_sync.groups import WeightGroup
from fsdpbench.engine.weight_sync.receiver import BucketReceiver, ReceiverState
from fsdpbench.engine.weight_sync.records import Bucket, GroupAddress, ReceiverTraits, TensorSpec
from fsdpbench.errors import WeightSyncError, WorkerError

CPU = Device("cpu")
FILE = "weights.safetensors"


class Receiver:
    """The child's side: one BucketReceiver a stage, and a fault to commit."""

    def __init__(self, stages: list[list[TensorSpec]], fault: str, device: Device = CPU) -> None:
        self.fault, self.device = fault, device
        where = device.torch_device
        self.version, self.pending = 0, False
        self.paused = False
        self.live = [
            {
                s.name: torch.zeros(s.shape, dtype=getattr(torch, s.dtype), device=where)
                for s in specs
            }
            for specs in stages
        ]
        self.receivers = [BucketReceiver(live, device) for live in self.live]
        self.num_buckets = 0

    def pause(self, in_flight: str) -> None:
        self.paused = True

    def resume(self) -> None:
        if self.get_version() < 0:
            raise WeightSyncError("half an update")
        self.paused = False

    def init_group(self, address: GroupAddress) -> None:
        if self.fault == "absent":
            return
        if self.fault == "wrong world size":
            address = replace(address, first_rank=address.world_size)
        group = WeightGroup.enter(address, self.device)
        group.join()
        self.receivers[address.stage].attach(group)

    def receive(self, bucket: Bucket, stage: int) -> None:
        assert self.paused
        self.num_buckets += 1
        if self.fault == f"die at bucket {self.num_buckets}":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == f"reset at bucket {self.num_buckets}":
            self.pending = True
            raise OSError("connection reset")
        if self.fault == f"skip bucket {self.num_buckets}":  # says yes and does not listen
            self.pending = True
            return
        if self.fault == "another model":
            self.receivers[stage].live = {"other": torch.zeros(1)}
        if self.fault == f"hang at bucket {self.num_buckets}":
            time.sleep(60)
        try:
            self.receivers[stage].receive(bucket)
        finally:
            self.pending = self.pending or self.receivers[stage].state is ReceiverState.PARTIAL

    def load(self, path: str, version: int) -> None:
        if self.fault == "cannot read":
            raise OSError("no such folder here")
        self.pending = True
        arrived = load_file(Path(path) / FILE)
        for live in self.live:
            for name, tensor in live.items():
                tensor.copy_(arrived[name])

    def finish(self, version: int, with_digests: bool, from_disk: bool) -> dict[str, str]:
        if self.fault == "corrupt":
            next(iter(self.live[0].values())).view(-1)[3] += 1
        digests: dict[str, str] = {}
        for receiver in self.receivers:
            if from_disk:
                receiver.state = ReceiverState.WHOLE
                digests.update(compute_digests(receiver.live.items()))
            else:
                digests.update(receiver.finish(with_digests=with_digests))
        self.pending = False
        self.version = version if self.fault != "stale" else self.version
        return digests if with_digests else {}

    def abort(self) -> None:
        for receiver in self.receivers:
            receiver.abandon()

    def leave(self) -> None:
        for receiver in self.receivers:
            receiver.detach()

    def get_version(self) -> int:
        return -1 if self.pending else self.version

    def digests(self) -> list[dict[str, str]]:
        return [compute_digests(live.items()) for live in self.live]

    def state(self) -> dict[str, Any]:
        fds = len(list(Path("/proc/self/fd").iterdir()))
        return {"paused": self.paused, "version": self.get_version(), "handles": fds}


def serve(connection: Any, stages: list[list[TensorSpec]], fault: str) -> None:
    gc.freeze()  # the parent's leftovers: a destructor of a group would wait for threads left there
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its parent
    receiver = Receiver(stages, fault)
    while True:
        name, arguments = connection.recv()
        try:
            connection.send((True, getattr(receiver, name)(*arguments)))
        except (RuntimeError, WeightSyncError, OSError) as error:
            connection.send((False, str(error)))


class ReceiverProcess:
    """An InferenceEngine whose weights live in a child; make it before any group of the parent."""

    def __init__(
        self,
        stages: list[list[TensorSpec]],
        traits: ReceiverTraits | None = None,
        fault: str = "",
        timeout_seconds: float = 30.0,
    ) -> None:
        plain = ReceiverTraits("local", pipeline_size=len(stages), gives_digests=True)
        self.traits = traits or plain
        self.timeout_seconds = timeout_seconds
        self.connection, child = multiprocessing.Pipe()
        self.pid = os.fork()  # workers of the pool are daemons, which multiprocessing lets not
        if self.pid == 0:
            try:
                serve(child, stages, fault)
            finally:
                os._exit(0)
        child.close()
        self.thread = ThreadPoolExecutor(1)
        self.from_disk = False

    def _round_trip(self, name: str, arguments: tuple[Any, ...]) -> Any:
        try:
            self.connection.send((name, arguments))
            if not self.connection.poll(self.timeout_seconds):
                raise WorkerError(f"no answer to {name}")
            ok, value = self.connection.recv()
        except (EOFError, ConnectionError) as error:
            raise WorkerError("the receiver's process has ended") from error
        if not ok:
            raise WeightSyncError(value)
        return value

    def call(self, name: str, *arguments: Any) -> Future[Any]:
        return self.thread.submit(self._round_trip, name, arguments)

    def ask(self, name: str, *arguments: Any) -> Any:
        return self.call(name, *arguments).result(self.timeout_seconds)

    def pause_generation(self, in_flight: str = "abort") -> None:
        self.ask("pause", in_flight)

    def continue_generation(self) -> None:
        self.ask("resume")

    def init_weights_update_group(self, address: GroupAddress) -> Future[None]:
        return self.call("init_group", address)

    def update_weights_from_distributed(self, bucket: Bucket, stage: int = 0) -> Future[None]:
        self.from_disk = False
        return self.call("receive", Bucket.from_json(bucket.to_json()), stage)

    def update_weights_from_disk(self, path: str, version: int) -> Future[None]:
        self.from_disk = True
        return self.call("load", path, version)

    def finish_weight_update(self, version: int, with_digests: bool = False) -> Future[Any]:
        return self.call("finish", version, with_digests, self.from_disk)

    def abort_weight_update(self, reason: str) -> None:
        self.ask("abort")

    def destroy_weights_update_group(self) -> None:
        self.ask("leave")

    def get_version(self) -> int:
        return self.ask("get_version")

    def compute_logprobs(self, sequences: Any) -> list[list[float]]:
        raise NotImplementedError

    def is_alive(self) -> bool:
        return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.connection.close()
        self.thread.shutdown(cancel_futures=True)


def write_weights(folder: Path, named_tensors: Any) -> None:
    save_file({name: tensor.contiguous() for name, tensor in named_tensors}, folder / FILE)
