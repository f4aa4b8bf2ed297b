"""Loads that go wrong on one rank: what each rank is told, and that all are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fsdpbench.engine.config.parallel import parse_backend
from fsdpbench.engine.parallel import materialize
from fsdpbench.engine.parallel.bucket_reader import MemorySource
from fsdpbench.engine.parallel.materialize import load_folder
from fsdpbench.engine.parallel.mesh import build_meshes
from fsdpbench.engine.parallel.weight_buckets import Piece, Span, plan_buckets
from fsdpbench.engine.parallel.weight_stream import broadcast_buckets
from fsdpbench.engine.parallel.weight_targets import ShardTarget
from fsdpbench.errors import CheckpointError, FsdpbenchError
from tests.distributed.payloads.parallel_policy import DEVICE, build_config, build_policy
from tests.distributed.payloads.parallel_weights import build_empty

COUNT = 40


class BreakingSource(MemorySource):
    """Tensors of which the rows from 20 on cannot be read."""

    def plan_reads(self, piece: Piece, target: torch.Tensor) -> Any:
        if piece.first_row < COUNT // 2:
            return super().plan_reads(piece, target)

        def fail() -> None:
            raise CheckpointError("the disk is gone")

        return [fail]


class BreakingTarget(ShardTarget):
    """A shard that takes one bucket and no more."""

    def place(self, piece: Piece, values: torch.Tensor) -> None:
        if piece.first_row > 0:
            raise CheckpointError("no room")
        super().place(piece, values)


def answer(call: Any) -> str:
    try:
        call()
    except FsdpbenchError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def break_streams(rank: int, world_size: int) -> dict[str, str]:
    """Break the source, the second rank's target, and nothing, one after the other."""
    meshes = build_meshes(parse_backend(f"fsdp:d{world_size}").strategy, "cpu")
    tensor = torch.arange(float(COUNT)).view(COUNT, 1)
    buckets = plan_buckets([Span("a", tensor.dtype, (COUNT, 1), slice(0, COUNT))], 32)
    said = {}

    def run(source: Any, target: ShardTarget) -> str:
        own = source({"a": tensor}) if rank == 0 else None
        return answer(lambda: broadcast_buckets(buckets, own, {"a": target}, meshes, DEVICE))

    said["source"] = run(BreakingSource, ShardTarget(torch.zeros(COUNT, 1)))
    kind = BreakingTarget if rank == 1 else ShardTarget
    said["target"] = run(MemorySource, kind(torch.zeros(COUNT, 1)))
    whole = ShardTarget(torch.zeros(COUNT, 1))
    said["nothing"] = run(MemorySource, whole)
    assert torch.equal(whole.shard, tensor)
    return said


def load_broken_folders(rank: int, world_size: int, folders: dict[str, str]) -> dict[str, str]:
    """Broadcast from folders of which only rank 0 sees the weights."""
    model, meshes = build_empty(build_config("tiny-llama", "fsdp:d2"))

    def load(folder: str) -> None:
        seen = Path(folder if rank == 0 else "/nowhere")
        load_folder(model, seen, meshes, DEVICE, broadcast=True, bucket_bytes=50_000)

    return {kind: answer(lambda folder=folder: load(folder)) for kind, folder in folders.items()}


def fail_to_allocate(rank: int, world_size: int) -> str:
    """Rank 1 finds no memory before a broadcast begins."""
    config = build_config(
        "tiny-llama",
        "fsdp:d2",
        init_from_scratch=False,
        fsdp={"memory_efficient_load": True},
    )
    allocate = materialize.allocate_shards

    def refuse(*_: Any, **__: Any) -> None:
        raise CheckpointError("no memory")

    try:
        if rank == 1:
            materialize.allocate_shards = refuse
        return answer(lambda: build_policy(config))
    finally:
        materialize.allocate_shards = allocate
