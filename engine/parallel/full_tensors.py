"""Whole tensors out of sharded ones: the inverse of `regions`, by all-gathers over plain groups.

DTensor's own `full_tensor` gives the same values; this way needs one all-gather an axis whatever
the placements, and works for shards that rest in host memory.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from fsdpbench.engine.parallel.regions import local_shard, plan_region, shape_of
from fsdpbench.engine.parallel.sequence import all_gather_first_dim


def gather_full_tensor(
    tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the whole tensor on `device`, on every rank; outside autograd.

    With `dtype` the shards are cast before they travel. Offloaded shards go to the device first:
    its collectives do not reach host memory, and it casts faster.
    Collective over: the axes of the tensor's mesh.
    """
    part = local_shard(tensor).to(device).to(dtype or tensor.dtype)
    if not isinstance(tensor, DTensor):
        return part
    mesh = tensor.device_mesh
    # the axes undo their cuts from the first to the last, as `regions` made them from the last
    for axis, placement in enumerate(tensor.placements):
        dim = getattr(placement, "dim", None)
        if dim is None or mesh.size(axis) == 1:
            continue
        outer = [
            (later.dim, mesh.size(number), mesh.get_local_rank(number))
            for number, later in reversed(list(enumerate(tensor.placements)))
            if number > axis and hasattr(later, "dim")
        ]
        extent = shape_of(plan_region(tensor.shape, outer))[dim]
        rows = part.movedim(dim, 0)
        padded = rows.new_zeros((-(-extent // mesh.size(axis)), *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        gathered = all_gather_first_dim(padded, mesh.get_group(axis))
        part = gathered[:extent].movedim(0, dim)
    return part.contiguous()
