"""What happened to device memory, in order: blocks that came and went. No tensors, no torch."""

from __future__ import annotations

from typing import Literal, NamedTuple


class MemoryEvent(NamedTuple):
    """One block of device memory comes or goes."""

    kind: Literal["alloc", "free"]
    block_id: int  # of the storage; given again only after its free
    num_bytes: int  # as requested, before the allocator rounds
    stream: int  # that was current at the allocation; a free has the same
