"""One folder filled by several ranks."""

from __future__ import annotations

import torch.distributed as dist

from fsdpbench.engine.checkpoint.manifest import Manifest
from fsdpbench.engine.checkpoint.recover import agree_on_checkpoint
from fsdpbench.engine.checkpoint.transaction import FolderTransaction
from fsdpbench.engine.parallel.agreement import Agreement
from fsdpbench.errors import FsdpbenchError


def resolve_differently(rank: int, world_size: int, folder: str) -> str:
    """Ask for a folder in which each rank sees another checkpoint."""
    return str(agree_on_checkpoint(f"{folder}/{rank}", "dcp", dist.group.WORLD))


def save_files(rank: int, world_size: int, path: str, failure: str) -> tuple[str, str]:
    """Write one file a rank; return the kind and text of the error, if there is one."""
    group = dist.group.WORLD
    try:
        with FolderTransaction(path, group) as save:
            with Agreement("save", group):
                if failure == "body" and rank == 0:
                    raise ValueError("disk on fire")  # noqa: TRY301  # stands for any failure
                (save.partial / str(rank)).write_text("12")
            size = 3 if failure == "unseen" and rank == 1 else 2
            save.publish(Manifest("dcp", 1, False, world_size), {str(rank): size})
    except (FsdpbenchError, ValueError) as error:
        return type(error).__name__, str(error)
    return "", ""
