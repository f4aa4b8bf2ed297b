"""Storage for shards that rest in host memory: page-locked once, and where FSDP2 keeps it.

FSDP2 page-locks a shard that is not, by a copy. It also pads a shard that is shorter than those of
its peers, by another; such a shard is left for it to allocate.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdpbench.engine.device import Device
from fsdpbench.engine.parallel.regions import local_shard


def allocate_host_shard(parameter: nn.Parameter, device: Device) -> torch.Tensor:
    """Return host storage of a meta parameter's kind, page-locked if `device` copies from it."""
    pinned = device.is_asynchronous and is_full_size(parameter)
    values = torch.empty_like(parameter, device="cpu", pin_memory=pinned)
    assert isinstance(values, torch.Tensor)
    return values


def is_full_size(parameter: torch.Tensor) -> bool:
    """Tell whether FSDP2 keeps this rank's shard as it is: no rank of the axis has more rows."""
    if not isinstance(parameter, DTensor) or not parameter.ndim:
        return True
    return local_shard(parameter).shape[0] == count_rows_of_first(parameter)


def count_rows_of_first(parameter: DTensor) -> int:
    """Return the rows that the first rank of the sharded axes holds, which is never fewer."""
    return -(-parameter.shape[0] // count_parts(parameter))


def count_parts(parameter: DTensor) -> int:
    """Return into how many parts the first dim is cut, over all axes."""
    parts = 1
    for axis, placement in enumerate(parameter.placements):
        if getattr(placement, "dim", None) == 0:
            parts *= parameter.device_mesh.size(axis)
    return parts
