"""Two ranks that write versions of weights together, and fail together."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from fsdpbench.engine.weight_sync.disk import DiskChannel
from fsdpbench.errors import FsdpbenchError


def publish(rank: int, world_size: int, path: str) -> list[str]:
    """Publish a version, then one that rank 1 cannot write, then another; return what came."""
    channel = DiskChannel(path, keep_versions=2, group=dist.group.WORLD)
    said = []
    for version in range(3):

        def write(folder: Path, version: int = version) -> None:
            if version == 1 and rank == 1:
                raise OSError(28, "No space left on device")
            (folder / f"part{rank}").write_text(f"{version}")

        try:
            said.append(channel.publish(version, write).name)
        except FsdpbenchError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def publish_unshared(rank: int, world_size: int, path: str) -> str:
    """Let rank 1 write where rank 0 does not look, as on a machine with a disk of its own."""
    channel = DiskChannel(path, group=dist.group.WORLD)
    channel._tell = lambda partial: make(Path(path) / f"disk{rank}")
    try:
        channel.publish(0, lambda folder: None)
    except FsdpbenchError as error:
        return str(error)
    return ""


def make(folder: Path) -> Path:
    folder.mkdir()
    (folder / f"part of {folder.name}").write_text("x")
    return folder
