"""What to load into a model from where: names checked, rows chosen, buckets planned.

A catalog knows names, shapes and places of tensors, not their values. Planning reads headers at
most; rank 0's plan can be sent to ranks that see no files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import nn

from fsdpbench.engine.parallel.mesh import DeviceMeshes
from fsdpbench.engine.parallel.regions import plan_local_region
from fsdpbench.engine.parallel.tensor import find_tied_parameters
from fsdpbench.engine.parallel.weight_buckets import (
    BUCKET_BYTES,
    Bucket,
    Span,
    plan_buckets,
)
from fsdpbench.engine.parallel.weight_files import describe_mismatch
from fsdpbench.engine.parallel.weight_targets import ShardTarget, TiedCopyTarget
from fsdpbench.errors import CheckpointError, list_names

if TYPE_CHECKING:
    from fsdpbench.engine.models.heads import PolicyModel


class Catalog(Protocol):
    """Tensors by name, without their values."""

    def check_names(self, shapes: Mapping[str, torch.Size]) -> None:
        """Raise CheckpointError, with all reasons at once, unless all of these can be loaded."""
        ...

    def find_unused(self, names: Collection[str]) -> list[str]:
        """List the tensors besides these."""
        ...

    def locate_rows(self, name: str, rows: slice) -> Span:
        """Say where rows of a tensor lie."""
        ...

    @property
    def origin(self) -> str:
        """What to call the catalog in a message."""
        ...


class MemoryCatalog:
    """The tensors of a state dict at hand."""

    origin = "full_state_dict of rank 0"

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def check_names(self, shapes: Mapping[str, torch.Size]) -> None:
        """Raise CheckpointError naming what is missing, of another shape or not of numbers."""
        found = {name: self.tensors[name] for name in shapes if name in self.tensors}
        problems = describe_mismatch(shapes, {n: tensor.shape for n, tensor in found.items()})
        other = [f"{n} ({t.dtype})" for n, t in found.items() if not t.is_floating_point()]
        if other:
            problems.append(f"of no floating dtype: {list_names(other)}")
        if problems:
            raise CheckpointError(f"{self.origin}: {'; '.join(problems)}.")

    def find_unused(self, names: Collection[str]) -> list[str]:
        """List the tensors besides these."""
        return [name for name in self.tensors if name not in names]

    def locate_rows(self, name: str, rows: slice) -> Span:
        """Say which rows of a tensor are meant."""
        tensor = self.tensors[name]
        return Span(name, tensor.dtype, tuple(tensor.shape) or (1,), rows)


@dataclass(frozen=True)
class WeightPlan:
    """What travels, in order. Small enough to be sent to every rank."""

    origin: str
    buckets: tuple[Bucket, ...]
    copy_of: Mapping[str, str]  # stored again under a tied name -> name of the parameter
    unused: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.num_bytes for bucket in self.buckets for piece in bucket.pieces)


def plan_weights(
    model: PolicyModel, catalog: Catalog, *, own_rows: bool, bucket_bytes: int = BUCKET_BYTES
) -> WeightPlan:
    """Plan the load of a whole model, or of the rows that this rank's shards need."""
    parameters = dict(model.named_hf_parameters())
    unused = catalog.find_unused(parameters)
    copy_of = find_tied_names(model, unused)
    copies = {name: parameters[first] for name, first in copy_of.items()}
    wanted = {**parameters, **copies}
    catalog.check_names({name: parameter.shape for name, parameter in wanted.items()})

    def spans(named: Mapping[str, nn.Parameter]) -> list[Span]:
        return [catalog.locate_rows(n, choose_rows(p, own_rows)) for n, p in named.items()]

    # a copy is compared with what its parameter was filled with, so it comes later
    buckets = plan_buckets(spans(parameters), bucket_bytes)
    buckets += plan_buckets(spans(copies), bucket_bytes)
    left = tuple(name for name in unused if name not in copies)
    return WeightPlan(catalog.origin, tuple(buckets), copy_of, left)


def choose_rows(parameter: torch.Tensor, own_rows: bool) -> slice:
    """Return all rows of a parameter, or those that this rank holds a part of."""
    if not own_rows:
        return slice(0, parameter.shape[0] if parameter.ndim else 1)
    region = plan_local_region(parameter)
    if any(part.start >= part.stop for part in region):
        return slice(0, 0)
    return region[0] if region else slice(0, 1)


def find_tied_names(model: PolicyModel, names: Collection[str]) -> dict[str, str]:
    """Map those of the names that the model ties to the name its parameter is loaded under."""
    copy_of = {}
    for group in find_tied_parameters(model):
        first, *others = map(model.name_in_checkpoint, group)
        copy_of.update({name: first for name in others if name in names})
    return copy_of


def share_plan(own_plan: WeightPlan | None, meshes: DeviceMeshes) -> WeightPlan:
    """Return rank 0's plan on every rank. Collective over: the world."""
    box = [own_plan]
    dist.broadcast_object_list(box, group=meshes.cpu_group, group_src=0)
    (plan,) = box
    assert plan is not None  # rank 0 passes one
    return plan


def build_targets(model: PolicyModel, plan: WeightPlan) -> dict[str, ShardTarget]:
    """Return where each tensor of a plan goes in this rank's model."""
    parameters = dict(model.named_hf_parameters())
    targets = {name: ShardTarget(parameter) for name, parameter in parameters.items()}
    copies = {name: TiedCopyTarget(parameters[first]) for name, first in plan.copy_of.items()}
    return {**targets, **copies}


def check_tied_copies(targets: Mapping[str, ShardTarget], plan: WeightPlan) -> None:
    """Raise CheckpointError if a copy of a tied parameter was another tensor."""
    copies = {n: t for n, t in targets.items() if isinstance(t, TiedCopyTarget)}
    differing = [name for name, target in copies.items() if target.differs]
    if differing:
        raise CheckpointError(
            f"{plan.origin}: {list_names(differing)} differs from the weight that config.json ties "
            "it to. Set tie_word_embeddings to false there, or remove the tensor."
        )
