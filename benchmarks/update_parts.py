"""The parts of a weight update that need no wire, on one device: gather, pack, apply, checksums.

    torchrun --nproc-per-node 1 benchmarks/update_parts.py --model qwen3-4b

The real sender and the real receiver, with a copy on the device where the broadcast would be: NCCL
does not connect two members on one GPU. Rank 0 prints one JSON object a round. With more ranks the
shards are gathered from all of them, and rank 0 receives.
"""

from __future__ import annotations

import argparse
import json
import queue
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from fsdpbench.engine.config.parallel import parse_backend
from fsdpbench.engine.config.tracing import PerfTracerConfig
from fsdpbench.engine.config.train import FinetuneSpec, TrainEngineConfig
from fsdpbench.engine.config.weight_sync import WeightUpdateMeta
from fsdpbench.engine.device import Device
from fsdpbench.engine.launch import join_process_group, leave_process_group
from fsdpbench.engine.parallel.mesh import build_meshes
from fsdpbench.engine.setup import build_parts
from fsdpbench.engine.tracing.tracer import build_tracer
from fsdpbench.engine.weight_sync.buckets import MIB, StagedBucket, plan_update
from fsdpbench.engine.weight_sync.digests import DigestSums, compare_digests
from fsdpbench.engine.weight_sync.fanout import Fanout
from fsdpbench.engine.weight_sync.receiver import BucketReceiver
from fsdpbench.engine.weight_sync.timings import PhaseClock
from fsdpbench.engine.weight_sync.xccl import BucketSender
from fsdpbench.engine.weight_updates import describe_weights, walk_weights

SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=100, train_batch_size=10)


class Copied:
    """A message that has been copied once its event has passed."""

    ended_at = None

    def __init__(self, device: Device, event: Any) -> None:
        self.device, self.event = device, event
        self.work = self

    def wait(self, check: Any = None) -> None:
        """Let the current stream wait; with `check`, as a broadcast's, the host."""
        if check is not None:
            self.event.synchronize()
        if self.device.is_asynchronous:
            self.device.current_stream().wait_event(self.event)


class DeviceWire:
    """Stands in for a group: what one end broadcasts, the other gets as a copy."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.messages: queue.Queue[tuple[torch.Tensor, Any]] = queue.Queue()

    def broadcast(self, tensor: torch.Tensor) -> Copied:
        """Send."""
        event = self.device.event()
        message = tensor.view(torch.uint8).clone()
        event.record()
        self.messages.put((message, event))
        return Copied(self.device, event)


class ReceivingEnd:
    """The receiver's side of the wire, as its `group`."""

    def __init__(self, wire: DeviceWire) -> None:
        self.wire = wire

    def broadcast(self, tensor: torch.Tensor) -> Copied:
        """Receive."""
        message, sent = self.wire.messages.get()
        Copied(self.wire.device, sent).wait()
        tensor.copy_(message)
        arrived = self.wire.device.event()
        arrived.record()
        return Copied(self.wire.device, arrived)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-1.7b", help="preset or folder")
    parser.add_argument("--backend", default="fsdp:d1", help="degrees, as fsdp:d2t2")
    parser.add_argument("--bucket-mb", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=4)
    return parser.parse_args()


def main() -> None:
    """Send and receive some rounds."""
    arguments = parse_arguments()
    device, _ = join_process_group()
    dtype = torch.bfloat16 if device.is_asynchronous else torch.float32
    meta = WeightUpdateMeta(wire_dtype=str(dtype).removeprefix("torch."))
    config = TrainEngineConfig(
        path=arguments.model,
        backend=arguments.backend,
        init_from_scratch=True,
        dtype=meta.wire_dtype,
        optimizer={"type": "adam", "lr": 1e-5},
    )
    meshes = build_meshes(parse_backend(config.backend).strategy, device.type)
    parts = build_parts(
        config, SPEC, device, meshes, build_tracer(PerfTracerConfig(), meshes.rank, device)
    )
    source = describe_weights(parts, meta)
    plan = plan_update(source.specs, arguments.bucket_mb * MIB)
    leads = meshes.rank == 0
    live = {
        spec.name: torch.zeros(spec.shape, dtype=dtype, device=device.torch_device)
        for spec in (source.specs if leads else ())
    }
    receiver, wire = BucketReceiver(live, device), DeviceWire(device)
    thread = ThreadPoolExecutor(1)

    def announce(planned: StagedBucket) -> list[Future[None]]:
        receiver.group = ReceivingEnd(wire)
        return [thread.submit(receiver.receive, planned.bucket)]

    for number in range(arguments.rounds):
        verifies = number == arguments.rounds - 1
        walk = walk_weights(parts, meta)()
        if not leads:
            for _ in walk:
                pass
            continue
        clock, sums = PhaseClock(device), DigestSums() if verifies else None
        device.synchronize()
        started = time.perf_counter()
        fanout = Fanout([], meta.timeout_seconds)
        sender = BucketSender(plan, {0: wire}, device, clock, announce, fanout, sums)
        sender.send(walk)
        with clock.phase("verify" if verifies else "apply"):
            arrived = receiver.finish(with_digests=verifies)
        seconds = time.perf_counter() - started
        if sums is not None:
            compare_digests(sums.collect(), arrived, "the receiver")
        phases = {name: round(value, 4) for name, value in clock.read().items()}
        size = sum(spec.num_bytes for spec in source.specs)
        line = {"model": arguments.model, "round": number, "bytes": size, "buckets": len(plan)}
        print(json.dumps({**line, "seconds": round(seconds, 4), **phases, "verified": verifies}))
    thread.shutdown()
    meshes.destroy()
    leave_process_group()


if __name__ == "__main__":
    main()
