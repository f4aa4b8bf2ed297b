"""Meshes as each rank sees them."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from fsdpbench.engine.config.parallel import FSDPParallelStrategy
from fsdpbench.engine.parallel.mesh import build_meshes

GROUPS = (
    "dp_group",
    "cp_group",
    "tp_group",
    "fsdp_group",
    "model_parallel_group",
    "cpu_group",
    "dp_cpu_group",
)


def strategy_of(dp: int, cp: int, tp: int) -> FSDPParallelStrategy:
    return FSDPParallelStrategy(
        data_parallel_size=dp, context_parallel_size=cp, tensor_parallel_size=tp
    )


def describe(rank: int, world_size: int, dp: int, cp: int, tp: int) -> dict[str, Any]:
    meshes = build_meshes(strategy_of(dp, cp, tp), "cpu")
    for name in GROUPS:  # each group works, and over the ranks that it names
        value = torch.tensor([1 << rank])
        dist.all_reduce(value, group=getattr(meshes, name))
        ranks = dist.get_process_group_ranks(getattr(meshes, name))
        assert value.item() == sum(1 << member for member in ranks), name
    return {
        "place": (meshes.dp_rank, meshes.cp_rank, meshes.tp_rank),
        "rank": meshes.rank,
        "world_size": meshes.world_size,
        "head": (meshes.is_data_parallel_head, meshes.data_parallel_head),
        "groups": {name: dist.get_process_group_ranks(getattr(meshes, name)) for name in GROUPS},
        "mesh_shapes": (
            tuple(meshes.world.shape),
            tuple(meshes.fsdp.shape),
            tuple(meshes.tp.shape) if meshes.tp else None,
        ),
    }


def count_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def build_and_destroy(rank: int, world_size: int) -> tuple[int, int, int, float]:
    before = count_groups()
    meshes = build_meshes(strategy_of(1, 1, 2), "cpu")
    during = count_groups()
    meshes.destroy()
    after = count_groups()
    meshes.destroy()
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    return before, during, after, float(total)


def count_threads_of_builds(
    rank: int, world_size: int, degrees: tuple[int, int, int]
) -> tuple[int, int]:
    """Threads of this process after one build with a sharded parameter, and after two more."""
    counts = []
    for _ in range(3):
        meshes = build_meshes(strategy_of(*degrees), "cpu")
        for mesh in (meshes.fsdp, meshes.tp):
            if mesh is not None:
                weight = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
                weight.detach().add_(1.0)  # torch caches how: by the mesh
        meshes.destroy()
        del mesh, meshes, weight
        gc.collect()
        counts.append(len(list(Path("/proc/self/task").iterdir())))
    return counts[0], counts[-1]


def compare_two_builds(rank: int, world_size: int) -> tuple[bool, bool]:
    first, second = (build_meshes(strategy_of(2, 1, 1), "cpu").fsdp for _ in range(2))
    return first == second, hash(first) == hash(second)
