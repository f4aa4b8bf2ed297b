"""Work that fails on some ranks of a group only."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fsdpbench.engine.parallel.agreement import Agreement
from fsdpbench.errors import PeerError


def read_disk(rank: int, failing: list[int]) -> None:
    if rank in failing:
        raise OSError(f"disk {rank}")


def fail_on(rank: int, world_size: int, failing: list[int]) -> tuple[str, str, float]:
    """Return what this rank raised, and a sum taken afterwards: the group must still work."""
    said = ("", "")
    try:
        with Agreement("reading", dist.group.WORLD):
            read_disk(rank, failing)
    except (OSError, PeerError) as error:
        said = (type(error).__name__, str(error))
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return (*said, total.item())
