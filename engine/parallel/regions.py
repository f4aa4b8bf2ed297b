"""Which part of a full tensor a rank holds. Arithmetic only.

The axes of a parameter's mesh apply from the last to the first: FSDP shards what tensor parallelism
left on the rank. Every cut is that of torch.chunk: ceil-sized parts, the last ones short or empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor

Region = tuple[slice, ...]


def plan_region(shape: Sequence[int], cuts: Iterable[tuple[int, int, int]]) -> Region:
    """Cut a shape by (dim, number of parts, index of the part), one after the other."""
    bounds = [(0, extent) for extent in shape]
    for dim, parts, index in cuts:
        start, stop = bounds[dim]
        step = -(-(stop - start) // parts)
        bounds[dim] = (min(start + index * step, stop), min(start + (index + 1) * step, stop))
    return tuple(slice(start, stop) for start, stop in bounds)


def plan_local_region(parameter: torch.Tensor) -> Region:
    """Return the region of the full tensor that this rank's shard of a parameter is."""
    if not isinstance(parameter, DTensor):
        return plan_region(parameter.shape, ())
    mesh = parameter.device_mesh
    cuts = [
        (placement.dim, mesh.size(axis), mesh.get_local_rank(axis))
        for axis, placement in reversed(list(enumerate(parameter.placements)))
        if hasattr(placement, "dim")  # Shard and FSDP's strided one; Replicate has none
    ]
    region = plan_region(parameter.shape, cuts)
    assert shape_of(region) == tuple(local_shard(parameter).shape), parameter.placements
    return region


def shape_of(region: Region) -> tuple[int, ...]:
    """Return the extents of a region."""
    return tuple(part.stop - part.start for part in region)


def local_shard(parameter: torch.Tensor) -> torch.Tensor:
    """Return the storage that this rank holds of a parameter; a view, outside autograd."""
    with torch.no_grad():  # a DTensor then gives its shard without a dispatch
        shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return shard.detach()
