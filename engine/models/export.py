"""Whole weights out of a sharded model, one at a time, under their names in Hugging Face files.

No rank holds more than one full tensor on its device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from fsdpbench.engine.models.heads import PolicyModel
from fsdpbench.engine.parallel.adapters import gather_merged_tensor

if TYPE_CHECKING:
    from fsdpbench.engine.device import Device
    from fsdpbench.engine.parallel.mesh import DeviceMeshes


def iterate_gathered_parameters(
    model: PolicyModel, device: Device, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor on the device) on every rank, in the model's order, tied ones once.

    Adapters are merged into the weights they adapt; the sums are rounded once, to `dtype` (None:
    that of the weights). Every rank must exhaust the iterator. Collective over: the world.
    """
    for name, _ in model.named_hf_parameters():
        yield name, gather_merged_tensor(model, name, device, dtype)


def iterate_full_parameters(
    model: PolicyModel,
    meshes: DeviceMeshes,
    device: Device,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield (name in a Hugging Face checkpoint, whole tensor on rank 0's CPU, None elsewhere).

    Tied parameters appear once. Every rank must exhaust the iterator. Collective over: the world.
    """
    for name, whole in iterate_gathered_parameters(model, device, dtype):
        yield name, whole.cpu() if meshes.rank == 0 else None
