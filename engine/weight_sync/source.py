"""The trainer's end of an update: what will be sent, and the walk over its whole tensors.

    source = describe_source(model.named_hf_parameters(), "bfloat16", num_layers=..., ...)
    walk = lambda: iterate_whole_tensors(model.named_hf_parameters(), device, torch.bfloat16)

for a model without adapters; `engine/models/export.iterate_gathered_parameters` is the walk that
merges adapters, and `named_adapter_parameters` gives the names to send them alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from fsdpbench.engine.device import Device
from fsdpbench.engine.parallel.full_tensors import gather_full_tensor
from fsdpbench.engine.weight_sync.records import TensorSpec

NamedTensor = tuple[str, torch.Tensor]


@dataclass(frozen=True)
class SourceModel:
    """What the sender knows of the trainer's model."""

    specs: tuple[TensorSpec, ...]  # in the order in which the tensors come; with the wire dtype
    num_layers: int
    is_tied: bool = False  # head and embedding are one tensor, which comes once
    family: str = ""  # model_type of its configuration, for the map of names
    adapters_only: bool = False  # the tensors are adapters'


def describe_source(
    named_parameters: Iterable[NamedTensor],
    wire_dtype: str,
    *,
    num_layers: int,
    is_tied: bool = False,
    family: str = "",
    adapters_only: bool = False,
) -> SourceModel:
    """Describe sharded or whole parameters as they will travel; no communication."""
    specs = tuple(
        TensorSpec(name, tuple(parameter.shape), wire_dtype) for name, parameter in named_parameters
    )
    return SourceModel(specs, num_layers, is_tied, family, adapters_only)


def iterate_whole_tensors(
    named_parameters: Iterable[NamedTensor], device: Device, dtype: torch.dtype | None = None
) -> Iterator[NamedTensor]:
    """Yield (name, whole tensor on the device) on every rank, in order.

    With `dtype` shards are cast before they travel, which gives the same values as a cast of the
    whole. Every rank must exhaust the iterator. Collective over: the parameters' meshes.
    """
    for name, parameter in named_parameters:
        yield name, gather_full_tensor(parameter, device.torch_device, dtype)
