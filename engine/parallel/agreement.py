"""Ranks that tell each other of an error, so that none waits for a peer that has given up.

The boundary: it carries outcomes of work that each rank does alone. Work with collectives inside
cannot be guarded so, since a rank that leaves it early leaves its peers in the middle.
"""

from __future__ import annotations

from types import TracebackType

import torch
import torch.distributed as dist

from fsdpbench.errors import PeerError, list_names


class Agreement:
    """A `with` block that succeeds on all ranks of a group, or fails on all of them.

    The rank with the error keeps it; the others raise PeerError with its text. What ends the
    process (an interrupt, an exit) is not carried: peers then learn of it from the launcher.
    Collective over: the group, at the end of the block.
    """

    def __init__(
        self,
        what: str,
        group: dist.ProcessGroup | None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.what, self.group = what, group
        self.device = device  # one that the group serves; on the CPU nothing waits for a device

    def __enter__(self) -> None:
        """Start the work of this rank."""

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        failed = torch.tensor(int(error is not None), dtype=torch.int32, device=self.device)
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=self.group)
        if not int(failed):
            return
        text = None if error is None else f"{type(error).__name__}: {error}"
        texts: list[str | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(texts, text, group=self.group)
        if error is None:
            ranks = [rank for rank, said in enumerate(texts) if said is not None]
            names = list_names(str(rank) for rank in ranks)
            raise PeerError(f"{self.what} failed on rank {names}: {texts[ranks[0]]}")
