"""From a parallelized meta model to one with values, each rank making only its own part.

A `WeightSource` answers for one region of one named tensor at a time, so a rank never holds more
than its shards and the region in flight. Tied names are one parameter and are filled once, under
the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.parallel.mesh import DeviceMeshes
from fsdpbench.engine.parallel.regions import Region, local_shard, plan_local_region
from fsdpbench.engine.parallel.seeded_weights import SeededWeights
from fsdpbench.engine.parallel.tensor import find_tied_parameters, tie_parameters
from fsdpbench.engine.parallel.weight_files import SafetensorsWeights
from fsdpbench.errors import CheckpointError, list_names
from fsdpbench.log import get_logger, warn_once

if TYPE_CHECKING:
    from fsdpbench.engine.device import Device
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

    Every rank reads for itself, without communication. Shards lie on the CPU under offload_params.
    """
    allocate_shards(model, "cpu" if config.fsdp.offload_params else device.torch_device)
    if not config.init_from_scratch:
        fill_from_folder(model, source)
        return
    weights = SeededWeights(
        config.seed, model.initializer_range, device.torch_device, model.initial_values
    )
    fill_parameters(model, weights)


def fill_from_folder(model: PolicyModel, folder: Path) -> None:
    """Read this rank's shards from a Hugging Face folder. No communication.

    Tensors that the model has no place for are named in a warning, but a head that the model ties
    must be the embedding it is tied to, or the folder means another model.
    """
    weights = SafetensorsWeights(folder)
    fill_parameters(model, weights)
    unused = weights.find_unused([name for name, _ in model.named_hf_parameters()])
    differing = []
    for first, *others in find_tied_parameters(model):
        parameter = model.get_parameter(first)
        shard, region = local_shard(parameter), plan_local_region(parameter)
        for name in map(model.name_in_checkpoint, others):
            if name not in unused:
                continue
            unused.remove(name)
            weights.check_names({name: parameter.shape})
            values = weights.read(name, parameter.shape, region)
            if not torch.equal(values.to(shard), shard):
                differing.append(name)
    if differing:
        raise CheckpointError(
            f"{folder}: {list_names(differing)} differs from the weight that config.json ties it "
            "to. Set tie_word_embeddings to false there, or remove the tensor."
        )
    if unused:
        warn_once(logger, f"{folder}: the model does not read {list_names(unused)}")


def allocate_shards(model: nn.Module, device: torch.device | str) -> None:
    """Give meta parameters storage without values on `device`; buffers and ties stay."""
    buffers = dict(model.named_buffers())
    shared = find_tied_parameters(model)
    model.to_empty(device=device)
    tie_parameters(model, shared)
    for name, values in buffers.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, values)


def fill_parameters(model: PolicyModel, weights: WeightSource) -> None:
    """Copy this rank's region of every parameter from `weights`.

    Calls `read` for every parameter in the same order on every rank, empty regions included.
    """
    parameters = dict(model.named_hf_parameters())
    weights.check_names({name: parameter.shape for name, parameter in parameters.items()})
    for name, parameter in parameters.items():
        shard = local_shard(parameter)
        values = weights.read(name, parameter.shape, plan_local_region(parameter))
        # over to the shard's device first: the files' dtype is rarely the wider one
        shard.copy_(values.to(shard.device))


def fsdp2_load_full_state_dict(
    model: PolicyModel,
    full_state_dict: Mapping[str, torch.Tensor],
    meshes: DeviceMeshes,
    device: Device,
) -> None:
    """Broadcast rank 0's whole state dict, one tensor at a time, into everybody's shards.

    Other ranks may pass an empty mapping. At most one full tensor is in flight on each rank.
    Collective over: the world.
    """
    fill_parameters(model, BroadcastWeights(full_state_dict, meshes, device.torch_device))


class BroadcastWeights:
    """A source that rank 0 holds and everybody hears, in the order of the parameters."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], meshes: DeviceMeshes, device: torch.device
    ) -> None:
        self.tensors, self.meshes, self.device = tensors, meshes, device
        self.dtypes: dict[str, torch.dtype] = {}

    def check_names(self, shapes: Mapping[str, torch.Size]) -> None:
        """Let rank 0 compare and tell the others. Collective over: the world."""
        problem = None
        if self.meshes.rank == 0:
            wrong = [
                name
                for name, shape in shapes.items()
                if name not in self.tensors or self.tensors[name].shape != shape
            ]
            problem = f"missing or of another shape: {list_names(wrong)}" if wrong else None
            self.dtypes = {name: tensor.dtype for name, tensor in self.tensors.items()}
        verdict: list[Any] = [problem, self.dtypes]
        dist.broadcast_object_list(verdict, group=self.meshes.cpu_group, group_src=0)
        problem, self.dtypes = verdict
        if problem:
            raise CheckpointError(f"full_state_dict of rank 0: {problem}.")

    def read(self, name: str, shape: torch.Size, region: Region) -> torch.Tensor:
        """Hear one tensor and keep the region. Collective over: the world."""
        if self.meshes.rank == 0:
            whole = self.tensors[name].to(self.device).contiguous()
        else:
            whole = torch.empty(shape, dtype=self.dtypes[name], device=self.device)
        dist.broadcast(whole, group_src=0)
        return whole[region]
