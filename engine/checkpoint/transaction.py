"""One save by all ranks into one folder: rank 0 opens and publishes it, and all succeed or fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from fsdpbench.engine.checkpoint.manifest import Manifest, list_files
from fsdpbench.engine.checkpoint.recover import point_latest
from fsdpbench.engine.checkpoint.store import close_partial, open_partial, publish, resolve_path
from fsdpbench.engine.parallel.agreement import Agreement
from fsdpbench.errors import CheckpointError, list_names


class FolderTransaction:
    """A `with` block in which ranks fill `partial`; without `publish` inside, nothing remains.

    Every rank of `group` (host tensors) takes part. Collective over: the group.
    """

    def __init__(self, path: str | Path, group: dist.ProcessGroup) -> None:
        self.target = self.partial = Path(path)  # as rank 0 sees them, within the block
        self.group = group
        self.leads = dist.get_rank(group) == 0

    def __enter__(self) -> Self:
        """Let rank 0 make the folder and tell the others. Collective over: the group."""
        with Agreement("save", self.group):
            if self.leads:
                self.target = resolve_path(self.target)
                self.partial = open_partial(self.target)
        said: list[Any] = [str(self.partial), str(self.target)]
        dist.broadcast_object_list(said, group=self.group, group_src=0)
        self.partial, self.target = map(Path, said)
        return self

    def publish(self, manifest: Manifest, expected: dict[str, int]) -> None:
        """Put the folder in its place. Collective over: the group.

        `expected` are files of this rank with sizes, which rank 0 must see, too: else the folder
        is not shared.
        """
        everybody: list[dict[str, int] | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everybody, expected, group=self.group)
        with Agreement("save", self.group):
            if not self.leads:
                return
            found = list_files(self.partial)
            for rank, files in enumerate(everybody):
                wrong = [name for name, size in (files or {}).items() if found.get(name) != size]
                if wrong:
                    raise CheckpointError(
                        f"{self.partial}: rank 0 does not see {list_names(wrong)} as rank {rank} "
                        "wrote it. Save to a file system that all ranks share."
                    )
            publish(self.partial, self.target, replace(manifest, files=found))
            point_latest(self.target)

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self.leads:
            close_partial(self.partial, self.target)
