"""Buckets of weights on their way into shards: read by each rank for itself, or sent by rank 0.

Schedule of the broadcast, for bucket i: all ranks place i - 1; rank 0 waits for the bytes of i,
which threads have read ahead, and copies them to its device; the ranks agree that all of this went
well; i is broadcast. The host runs ahead of the device: reading, copying and sending overlap.

Besides its shards a rank holds one bucket on its device, and where it reads, three host stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist

from fsdpbench.engine.device import Device
from fsdpbench.engine.parallel.agreement import Agreement
from fsdpbench.engine.parallel.bucket_reader import BucketReader, PieceSource, Stage
from fsdpbench.engine.parallel.mesh import DeviceMeshes
from fsdpbench.engine.parallel.weight_buckets import Bucket, largest_bucket_bytes
from fsdpbench.engine.parallel.weight_targets import ShardTarget, place_bucket

WHAT = "loading weights"


class Landing:
    """Memory on the device that holds one bucket at a time, in the order of the current stream."""

    def __init__(self, buckets: Sequence[Bucket], device: Device) -> None:
        num_bytes = largest_bucket_bytes(buckets)
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)

    def room_for(self, bucket: Bucket) -> torch.Tensor:
        """Return the part that the bucket fills."""
        return self.memory[: bucket.num_bytes]

    def fetch(self, bucket: Bucket, stage: Stage) -> torch.Tensor:
        """Copy a bucket from its stage, without waiting for the copy."""
        room = self.room_for(bucket)
        room.copy_(stage.memory[: bucket.num_bytes], non_blocking=True)
        stage.mark_copies_enqueued()
        return room


def room_to_broadcast(
    bucket: Bucket, landing: Landing | None, arriving: Iterator[tuple[Bucket, Stage]] | None
) -> torch.Tensor:
    """Return the bucket's bytes on rank 0, and elsewhere the memory that they will be sent to."""
    if arriving is None:
        assert landing is not None  # a rank that does not read has one
        return landing.room_for(bucket)
    _, stage = next(arriving)
    return landing.fetch(bucket, stage) if landing else stage.memory[: bucket.num_bytes]


def read_buckets(
    buckets: Sequence[Bucket],
    source: PieceSource,
    targets: Mapping[str, ShardTarget],
    device: Device,
) -> None:
    """Read the buckets and fill the targets, which lie on `device`. No communication."""
    with BucketReader(buckets, source, device) as reader:
        landing = Landing(buckets, device) if device.is_asynchronous else None
        for bucket, stage in reader:
            memory = landing.fetch(bucket, stage) if landing else stage.memory
            place_bucket(bucket, memory, targets)


def broadcast_buckets(
    buckets: Sequence[Bucket],
    source: PieceSource | None,
    targets: Mapping[str, ShardTarget],
    meshes: DeviceMeshes,
    device: Device,
) -> None:
    """Send rank 0's buckets to every rank and fill the targets, on `device` or the host.

    Only rank 0 has a source. All ranks pass the same buckets. What one rank fails at, all raise.
    Collective over: the world.
    """
    with ExitStack() as stack:
        with Agreement(WHAT, meshes.cpu_group):
            reader: BucketReader | None = None
            landing: Landing | None = None
            if source is not None:
                reader = stack.enter_context(BucketReader(buckets, source, device))
            if reader is None or device.is_asynchronous:  # else it sends from the stages
                landing = Landing(buckets, device)
        arriving = iter(reader) if reader is not None else None
        placed: tuple[Bucket, torch.Tensor] | None = None
        for bucket in buckets:
            with Agreement(WHAT, meshes.cpu_group):
                if placed is not None:
                    place_bucket(*placed, targets)
                memory = room_to_broadcast(bucket, landing, arriving)
            dist.broadcast(memory, group_src=0)
            placed = bucket, memory
        with Agreement(WHAT, meshes.cpu_group):
            if placed is not None:
                place_bucket(*placed, targets)
