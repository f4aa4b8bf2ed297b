"""Sharded tensors against their originals: FSDP's own cuts, and the gather that undoes them."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdpbench.engine.config.parallel import FSDPParallelStrategy
from fsdpbench.engine.parallel.full_tensors import gather_full_tensor
from fsdpbench.engine.parallel.mesh import build_meshes
from fsdpbench.engine.parallel.regions import local_shard, plan_local_region


def build_sharded(world_size: int, tp: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Layers with dims that do not divide by the axes; returns the full values, too."""
    meshes = build_meshes(
        FSDPParallelStrategy(data_parallel_size=world_size // tp, tensor_parallel_size=tp), "cpu"
    )
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 20), nn.Linear(20, 10), nn.Linear(10, 3))
    full = {name: p.detach().clone() for name, p in model.named_parameters()}
    if meshes.tp is not None:
        parallelize_module(model, meshes.tp, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=meshes.fsdp)
    return model, full


def compare_regions_with_fsdp(rank: int, world_size: int, tp: int) -> list[str]:
    model, full = build_sharded(world_size, tp)
    return [
        name
        for name, parameter in model.named_parameters()
        if not torch.equal(local_shard(parameter), full[name][plan_local_region(parameter)])
    ]


def gather_sharded_tensors(rank: int, world_size: int, tp: int) -> list[str]:
    model, full = build_sharded(world_size, tp)
    device = torch.device("cpu")
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return [
        name
        for name, parameter in model.named_parameters()
        if not torch.equal(gather_full_tensor(parameter, device), full[name])
    ]
