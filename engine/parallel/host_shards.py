"""Storage for shards that rest in host memory: page-locked once, and where FSDP2 keeps it.

FSDP2 page-locks a shard that is not, by a copy, with torch's allocator, which rounds sizes up to
powers of two. It also pads a shard that is shorter than those of its peers, by another copy; such
a shard is left for it to allocate.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdpbench.engine.device import Device
from fsdpbench.engine.host_memory import HostRegions
from fsdpbench.engine.parallel.regions import local_shard


def allocate_host_shards(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], device: Device
) -> dict[str, torch.Tensor]:
    """Return host storage of each meta parameter's kind, page-locked where `device` copies from it.

    The pages stay locked until the model is gone.
    """
    values = {name: torch.empty_like(p, device="cpu") for name, p in parameters.items()}
    if not device.is_asynchronous:
        return values
    regions = HostRegions(device)
    for value in values.values():
        if is_full_size(value):
            move_into_region(value, regions)
    regions.wait()  # FSDP2 looks at once whether a shard is locked
    weakref.finalize(model, release, regions, device)
    return values


def move_into_region(value: torch.Tensor, regions: HostRegions) -> None:
    """Let a tensor without values, or its shard, lie in a region of its own."""
    with torch.no_grad():  # here DTensor hands out its own shard, not a view of it
        shard = value.to_local() if isinstance(value, DTensor) else value
        shard.set_(regions.allocate(tuple(shard.shape), shard.dtype))  # type: ignore[call-overload]


def is_full_size(parameter: torch.Tensor) -> bool:
    """Tell whether FSDP2 keeps this rank's shard as it is: no rank of the axis has more rows."""
    if not isinstance(parameter, DTensor) or not parameter.ndim:
        return True
    parts = 1
    for axis, placement in enumerate(parameter.placements):
        if getattr(placement, "dim", None) == 0:
            parts *= parameter.device_mesh.size(axis)
    return local_shard(parameter).shape[0] == -(-parameter.shape[0] // parts)


def release(regions: HostRegions, device: Device) -> None:
    """Unlock the pages once nothing on the device reads them."""
    device.synchronize()
    regions.close()
