"""Rank 0 trains and rank 1 receives, each on a GPU; commands travel over the host's group."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from fsdpbench.engine.config.weight_sync import WeightUpdateMeta
from fsdpbench.engine.device import Device
from fsdpbench.engine.weight_sync.records import ReceiverTraits
from fsdpbench.engine.weight_sync.source import describe_source
from fsdpbench.engine.weight_sync.update import WeightUpdater
from fsdpbench.errors import WeightSyncError
from tests.distributed.receiver_processes import Receiver

HOST = torch.device("cpu")


class NeighbourEngine:
    """The receiver on rank 1; one command at a time."""

    traits = ReceiverTraits("local", gives_digests=True)

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1)

    def call(self, name: str, *arguments: Any) -> Future[Any]:
        return self.thread.submit(self._round_trip, name, arguments)

    def _round_trip(self, name: str, arguments: tuple[Any, ...]) -> Any:
        dist.send_object_list([name, arguments], dst=1, device=HOST)
        answer = [None, None]
        dist.recv_object_list(answer, src=1, device=HOST)
        ok, value = answer
        if not ok:
            raise WeightSyncError(str(value))
        return value

    def pause_generation(self, in_flight: str = "abort") -> None:
        self.call("pause", in_flight).result(60)

    def continue_generation(self) -> None:
        self.call("resume").result(60)

    def init_weights_update_group(self, address: Any) -> Future[None]:
        return self.call("init_group", address)

    def update_weights_from_distributed(self, bucket: Any, stage: int = 0) -> Future[None]:
        return self.call("receive", bucket, stage)

    def finish_weight_update(self, version: int, with_digests: bool = False) -> Future[Any]:
        return self.call("finish", version, with_digests, False)

    def abort_weight_update(self, reason: str) -> None:
        self.call("abort").result(60)

    def destroy_weights_update_group(self) -> None:
        self.call("leave").result(60)

    def get_version(self) -> int:
        return self.call("get_version").result(60)


def serve(specs: Any, fault: str) -> None:
    receiver = Receiver([list(specs)], fault, Device("cuda", 1))
    while True:
        command = [None, None]
        dist.recv_object_list(command, src=0, device=HOST)
        name, arguments = command
        if name == "stop":
            return
        try:
            answer = [True, getattr(receiver, name)(*arguments)]
        except (RuntimeError, WeightSyncError) as error:
            answer = [False, str(error)]
        dist.send_object_list(answer, dst=0, device=HOST)


def update(
    rank: int, world_size: int, fault: str = "", width: int = 2048, chunk_mb: int = 16
) -> dict[str, Any] | None:
    """Carry 8 square tensors, fp32 here and bf16 on the wire, three times.

    They make 4 buckets of 2 as they are (8 MiB each, 16 MiB a bucket).
    """
    generator = torch.Generator("cuda").manual_seed(5)
    tensors = {
        f"model.layers.{index}.w": torch.randn(width, width, generator=generator, device="cuda")
        for index in range(8)
    }
    source = describe_source(tensors.items(), "bfloat16", num_layers=8)
    if rank:
        serve(source.specs, fault)
        return None
    device = Device("cuda", 0)
    engine = NeighbourEngine()
    meta = WeightUpdateMeta(
        wire_dtype="bfloat16",
        weight_chunked_mem_mb=chunk_mb,
        verify=True,
        timeout_seconds=5 if fault else 60,
    )
    updater = WeightUpdater([engine], meta, source, device)
    outcome: Any = []
    began = time.monotonic()
    try:
        for version in (1, 2, 3):
            outcome.append(updater.update(version, lambda: iter(tensors.items())).to_json())
    except WeightSyncError as error:
        outcome = str(error)
    seconds = time.monotonic() - began
    updater.close()
    dist.send_object_list(["stop", ()], dst=1, device=HOST)
    healthy = float(tensors["model.layers.0.w"].sum().isfinite())  # the device still answers
    return {"outcome": outcome, "seconds": seconds, "healthy": healthy}
