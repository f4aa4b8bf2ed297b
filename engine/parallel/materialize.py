"""From a parallelized meta model to one with values, each rank making only its own part.

Weights of a folder come in buckets, so a rank never holds more than its shards and the buckets in
flight: either every rank reads its own rows, or rank 0 reads and all hear. Tied names are one
parameter and are filled once, under the first.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.device import Device
from fsdpbench.engine.parallel.agreement import Agreement
from fsdpbench.engine.parallel.bucket_reader import FileSource, MemorySource, PieceSource
from fsdpbench.engine.parallel.host_shards import allocate_host_shards
from fsdpbench.engine.parallel.mesh import DeviceMeshes
from fsdpbench.engine.parallel.regions import Region, local_shard, plan_local_region
from fsdpbench.engine.parallel.seeded_weights import SeededWeights
from fsdpbench.engine.parallel.tensor import find_tied_parameters, tie_parameters
from fsdpbench.engine.parallel.weight_buckets import BUCKET_BYTES
from fsdpbench.engine.parallel.weight_files import SafetensorsWeights
from fsdpbench.engine.parallel.weight_plan import (
    MemoryCatalog,
    WeightPlan,
    build_targets,
    check_tied_copies,
    plan_weights,
    share_plan,
)
from fsdpbench.engine.parallel.weight_stream import WHAT, broadcast_buckets, read_buckets
from fsdpbench.errors import list_names
from fsdpbench.log import get_logger, warn_once

if TYPE_CHECKING:
    from fsdpbench.engine.models.heads import PolicyModel


logger = get_logger(__name__)


class WeightSource(Protocol):
    """Where values come from; names and shapes are those of the Hugging Face checkpoint."""

    def check_names(self, shapes: Mapping[str, torch.Size]) -> None:
        """Refuse, with all reasons at once, if some tensor is missing or of another shape."""
        ...

    def read(self, name: str, shape: torch.Size, region: Region) -> torch.Tensor:
        """Return the region of the tensor, in the source's own dtype and on its own device."""
        ...


def materialize_model(
    model: PolicyModel,
    config: TrainEngineConfig,
    source: Path,
    meshes: DeviceMeshes,
    device: Device,
) -> None:
    """Allocate the shards of a parallelized meta model and fill them from `source` or at random.

    Shards lie on the CPU under offload_params. Only where `config.broadcasts_weights` is true do
    ranks communicate, and only rank 0 needs the weights of `source`. Collective over: the world.
    """
    broadcast = config.broadcasts_weights
    with Agreement(WHAT, meshes.cpu_group) if broadcast else nullcontext():
        allocate_shards(model, device, in_host_memory=config.fsdp.offload_params)
    if not config.init_from_scratch:
        load_folder(model, source, meshes, device, broadcast=broadcast)
        return
    weights = SeededWeights(
        config.seed, model.initializer_range, device.torch_device, model.initial_values
    )
    fill_parameters(dict(model.named_hf_parameters()), weights)


def load_folder(
    model: PolicyModel,
    folder: Path,
    meshes: DeviceMeshes,
    device: Device,
    *,
    broadcast: bool,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Fill an existing model from a Hugging Face folder; rank 0 logs bytes and time.

    With `broadcast` rank 0 reads and all hear; an error of one rank is raised on all. Without it
    each rank reads its own rows, there is no communication, and an error is this rank's alone.
    Collective over: the world, with `broadcast`.
    """
    started = time.perf_counter()
    if broadcast:
        plan = broadcast_folder(model, folder, meshes, device, bucket_bytes)
    else:
        plan = fill_from_folder(model, folder, bucket_bytes)
    device.synchronize()
    if meshes.rank == 0:
        seconds, gigabytes = time.perf_counter() - started, plan.num_bytes / 1e9
        how = "broadcast" if broadcast else "read by rank 0"
        logger.info(
            "weights: %.2f GB %s in %.1f s (%.1f GB/s)",
            gigabytes,
            how,
            seconds,
            gigabytes / seconds,
        )


def fill_from_folder(
    model: PolicyModel, folder: Path, bucket_bytes: int = BUCKET_BYTES
) -> WeightPlan:
    """Read this rank's shards from a Hugging Face folder; return what was read. No communication.

    Tensors that the model has no place for are named in a warning, but a head that the model ties
    must be the embedding it is tied to, or the folder means another model.
    """
    plan = plan_weights(model, SafetensorsWeights(folder), own_rows=True, bucket_bytes=bucket_bytes)
    targets = build_targets(model, plan)
    read_buckets(plan.buckets, FileSource(), targets, find_resting_device(model))
    check_tied_copies(targets, plan)
    warn_of_unused(plan)
    return plan


def broadcast_folder(
    model: PolicyModel, folder: Path, meshes: DeviceMeshes, device: Device, bucket_bytes: int
) -> WeightPlan:
    """Let rank 0 read a Hugging Face folder for all; as `fill_from_folder` otherwise.

    Collective over: the world.
    """
    own_plan = None
    with Agreement(WHAT, meshes.cpu_group):
        if meshes.rank == 0:
            own_plan = plan_weights(
                model, SafetensorsWeights(folder), own_rows=False, bucket_bytes=bucket_bytes
            )
    source = FileSource() if own_plan else None
    plan = broadcast_weights(model, own_plan, source, meshes, device)
    if meshes.rank == 0:
        warn_of_unused(plan)
    return plan


def fsdp2_load_full_state_dict(
    model: PolicyModel,
    full_state_dict: Mapping[str, torch.Tensor],
    meshes: DeviceMeshes,
    device: Device,
) -> None:
    """Broadcast rank 0's whole state dict, in buckets, into everybody's shards.

    Other ranks may pass an empty mapping. Names are those of a Hugging Face checkpoint; more than
    the model has do not matter. Collective over: the world.
    """
    own_plan = None
    with Agreement(WHAT, meshes.cpu_group):
        if meshes.rank == 0:
            own_plan = plan_weights(model, MemoryCatalog(full_state_dict), own_rows=False)
    source = MemorySource(full_state_dict) if own_plan else None
    broadcast_weights(model, own_plan, source, meshes, device)


def broadcast_weights(
    model: PolicyModel,
    own_plan: WeightPlan | None,
    source: PieceSource | None,
    meshes: DeviceMeshes,
    device: Device,
) -> WeightPlan:
    """Tell all ranks rank 0's plan, carry it out and return it. Collective over: the world."""
    plan = share_plan(own_plan, meshes)
    with Agreement(WHAT, meshes.cpu_group):
        targets = build_targets(model, plan)
    broadcast_buckets(plan.buckets, source, targets, meshes, device)
    with Agreement(WHAT, meshes.cpu_group):
        check_tied_copies(targets, plan)
    return plan


def warn_of_unused(plan: WeightPlan) -> None:
    """Name the tensors that the model has no place for."""
    if plan.unused:
        warn_once(logger, f"{plan.origin}: the model does not read {list_names(plan.unused)}")


def find_resting_device(model: nn.Module) -> Device:
    """Return the device on which the shards of a model rest."""
    for parameter in model.parameters():
        where = local_shard(parameter).device
        return Device(where.type, where.index)
    return Device("cpu")


def allocate_shards(model: nn.Module, device: Device, *, in_host_memory: bool = False) -> None:
    """Give meta parameters storage without values, tied ones once; buffers stay as they are.

    Storage is handed over as a state dict, module by module: FSDP2 listens to that.
    """
    shared = find_tied_parameters(model)
    parameters = dict(model.named_parameters())
    if in_host_memory:
        values = allocate_host_shards(model, parameters, device)
    else:
        where = device.torch_device
        values = {n: torch.empty_like(p, device=where) for n, p in parameters.items()}
    for name, value in values.items():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner).load_state_dict({leaf: value}, strict=False, assign=True)
    tie_parameters(model, shared)


def fill_parameters(named: Mapping[str, nn.Parameter], weights: WeightSource) -> None:
    """Copy this rank's region of each named parameter from `weights`.

    Calls `read` for every parameter in the mapping's order, empty regions included.
    """
    weights.check_names({name: parameter.shape for name, parameter in named.items()})
    for name, parameter in named.items():
        shard = local_shard(parameter)
        values = weights.read(name, parameter.shape, plan_local_region(parameter))
        # over to the shard's device first: the source's dtype is rarely the wider one
        shard.copy_(values.to(shard.device))
