"""What torch's CUDA caching allocator would reserve for a recorded order of allocations and frees.

A replay of the native backend of torch 2.11 (c10/cuda/CUDACachingAllocator.cpp), without torch and
without a GPU. It knows bytes, streams and order, and nothing of tensors, kernels or time. Left out:
expandable segments, private pools of CUDA graphs, and blocks that `record_stream` holds back until
an event has passed (the engine uses none of the three; a freed block is free at once).

The rules, in the order in which `CachingAllocator.allocate` applies them:

1. A request is rounded up to 512 bytes. Up to 1 MiB it is served by the small pool of its stream,
   above by the large one. Pools never lend to each other, and no stream lends to another.
2. The smallest free block that is large enough serves it; among equal ones, the lowest address.
3. If there is none, cudaMalloc gives a segment: 2 MiB (small), 20 MiB (large, below 10 MiB), or the
   request rounded up to 2 MiB.
4. The rest of the block is split off if it is at least 512 bytes (small) or more than 1 MiB
   (large). Otherwise the request keeps all of the block, and all of it counts as allocated.
5. A freed block joins its free neighbours of the same segment. Segments stay reserved.
6. If cudaMalloc fails, every segment without a used block goes back, and one more try follows.

Note: addresses of segments. Rule 2 needs addresses, which the driver chooses. Inside a segment they
are known; `SegmentOrder` says how those of successive segments are assumed to lie. Ties can decide
a whole branch: one recorded order (qwen3-1.7b, c2, 32,768 tokens, checkpointing) peaks in the first
backward at 27,732 MiB with ascending segments, at 32,288 with descending ones and at 27,732 or
32,480 with random ones; an H200 had 32,384. Two orders that differ say how far a peak hangs on it.
On an H200 (torch 2.11) successive segments of 20 MiB and more fell, those of 2 MiB did not; random
requests of few sizes then ended elsewhere in three of four orders, of many sizes in none of twelve.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fsdpbench.bench.predict.events import MemoryEvent
from fsdpbench.units import MIB

MIN_BLOCK_BYTES = 512
SMALL_REQUEST_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
MIN_OWN_SEGMENT_BYTES = 10 * MIB
SEGMENT_ROUNDING_BYTES = 2 * MIB

SegmentOrder = Literal["ascending", "descending"]
"""Where the driver puts each further segment: above or below the ones before it."""


@dataclass(frozen=True)
class AllocatorSettings:
    """The part of PYTORCH_CUDA_ALLOC_CONF that the replay knows; the defaults are torch's."""

    max_split_bytes: int | None = (
        None  # blocks of this size and above are never split; None: no cap
    )
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES  # waste allowed in such a block
    roundup_power2_divisions: int = 0  # steps between two powers of two; 0 and 1: plain rounding
    segment_order: SegmentOrder = "descending"


DEFAULT_SETTINGS = AllocatorSettings()


@dataclass(frozen=True)
class AllocatorResult:
    """Highest marks since the start or the last `reset_peaks`, as torch's statistics name them."""

    peak_reserved_bytes: int  # reserved_bytes.all.peak
    peak_allocated_bytes: int  # allocated_bytes.all.peak: whole blocks, see rule 4
    num_segments: int  # segment.all.peak: most segments held at once
    num_retries: int  # num_alloc_retries: cudaMalloc failed and the cache was given back
    oom_event_index: int | None  # the event that found no memory; the replay ended there
    fragmentation_at_peak: float  # share of the reserved bytes not allocated when they peaked


class Block:
    """A stretch of one segment, in use or free; `previous` and `next` are its neighbours there."""

    __slots__ = ("address", "in_use", "next", "num_bytes", "pool", "previous")

    def __init__(self, pool: Pool, address: int, num_bytes: int) -> None:
        self.pool = pool
        self.address = address
        self.num_bytes = num_bytes
        self.in_use = False
        self.previous: Block | None = None
        self.next: Block | None = None


class Pool:
    """The free blocks of one stream and one kind of request, by size and then by address."""

    __slots__ = ("blocks", "is_small")

    def __init__(self, is_small: bool) -> None:
        self.is_small = is_small
        # Addresses differ, so comparing two entries never reaches the blocks.
        self.blocks: list[tuple[int, int, Block]] = []

    def add(self, block: Block) -> None:
        """Enter a free block."""
        insort(self.blocks, (block.num_bytes, block.address, block))

    def remove(self, block: Block) -> None:
        """Take a block out, by its present size and address."""
        del self.blocks[bisect_left(self.blocks, (block.num_bytes, block.address))]

    def find(self, num_bytes: int) -> int:
        """Return the place of the first block that is large enough, or the number of blocks."""
        return bisect_left(self.blocks, (num_bytes,))


class CachingAllocator:
    """The state of one device's allocator. Sizes in bytes; streams are any integers."""

    def __init__(
        self, limit_bytes: int | None = None, settings: AllocatorSettings = DEFAULT_SETTINGS
    ) -> None:
        self.reserved_bytes = 0
        self.allocated_bytes = 0
        self.num_segments = 0
        self.num_retries = 0
        self._limit_bytes = limit_bytes
        self._settings = settings
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._end_of_addresses = 0
        self.reset_peaks()

    def reset_peaks(self) -> None:
        """Forget the highest marks; they start again from what is held now."""
        self._peak_reserved_bytes = self.reserved_bytes
        self._peak_allocated_bytes = self.allocated_bytes
        self._peak_num_segments = self.num_segments
        self._allocated_at_peak_bytes = self.allocated_bytes

    def allocate(self, num_bytes: int, stream: int) -> Block | None:
        """Return a block for a request of at least one byte, or None if the memory is out."""
        rounded = self._round(num_bytes)
        is_small = rounded <= SMALL_REQUEST_BYTES
        pool = self._pools.get((stream, is_small))
        if pool is None:
            pool = self._pools[stream, is_small] = Pool(is_small)
        block = self._take_free(pool, rounded) or self._take_new(pool, rounded)
        if block is None:
            return None
        self._split(block, rounded)
        block.in_use = True
        self.allocated_bytes += block.num_bytes
        self._peak_allocated_bytes = max(self._peak_allocated_bytes, self.allocated_bytes)
        if self.reserved_bytes > self._peak_reserved_bytes:
            self._peak_reserved_bytes = self.reserved_bytes
            self._allocated_at_peak_bytes = self.allocated_bytes
        return block

    def free(self, block: Block) -> None:
        """Give a block back to the pool of the stream that asked for it, joined with its rest."""
        self.allocated_bytes -= block.num_bytes
        block.in_use = False
        pool = block.pool
        previous, following = block.previous, block.next
        if previous is not None and not previous.in_use:
            pool.remove(previous)
            block.address = previous.address
            block.num_bytes += previous.num_bytes
            block.previous = previous.previous
            if block.previous is not None:
                block.previous.next = block
        if following is not None and not following.in_use:
            pool.remove(following)
            block.num_bytes += following.num_bytes
            block.next = following.next
            if block.next is not None:
                block.next.previous = block
        pool.add(block)

    def empty_cache(self) -> None:
        """Give back every segment that holds no used block."""
        for pool in self._pools.values():
            for _, _, block in list(pool.blocks):
                if block.previous is None and block.next is None:
                    self._release(block)

    def result(self, oom_event_index: int | None = None) -> AllocatorResult:
        """Return the highest marks so far."""
        peak = self._peak_reserved_bytes
        return AllocatorResult(
            peak_reserved_bytes=peak,
            peak_allocated_bytes=self._peak_allocated_bytes,
            num_segments=self._peak_num_segments,
            num_retries=self.num_retries,
            oom_event_index=oom_event_index,
            fragmentation_at_peak=1 - self._allocated_at_peak_bytes / peak if peak else 0.0,
        )

    def _round(self, num_bytes: int) -> int:
        divisions = self._settings.roundup_power2_divisions
        if divisions > 1 and num_bytes > MIN_BLOCK_BYTES * divisions:
            step = (1 << (num_bytes.bit_length() - 1)) // (1 << (divisions.bit_length() - 1))
            return -(-num_bytes // step) * step
        return max(-(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES, MIN_BLOCK_BYTES)

    def _take_free(self, pool: Pool, num_bytes: int) -> Block | None:
        place = pool.find(num_bytes)
        if place == len(pool.blocks):
            return None
        found_bytes, _, block = pool.blocks[place]
        cap = self._settings.max_split_bytes
        if cap is not None:
            if num_bytes < cap <= found_bytes:
                return None
            waste = found_bytes - num_bytes
            if num_bytes >= cap and waste >= self._settings.max_non_split_rounding_bytes:
                return None
        del pool.blocks[place]
        return block

    def _take_new(self, pool: Pool, num_bytes: int) -> Block | None:
        if num_bytes <= SMALL_REQUEST_BYTES:
            segment_bytes = SMALL_SEGMENT_BYTES
        elif num_bytes < MIN_OWN_SEGMENT_BYTES:
            segment_bytes = LARGE_SEGMENT_BYTES
        else:
            segment_bytes = -(-num_bytes // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES
        if not self._fits(segment_bytes):
            enough = self._release_oversize(pool, num_bytes) and self._fits(segment_bytes)
            if not enough:
                self.empty_cache()
                self.num_retries += 1
                if not self._fits(segment_bytes):
                    return None
        self.reserved_bytes += segment_bytes
        self.num_segments += 1
        self._peak_num_segments = max(self._peak_num_segments, self.num_segments)
        return Block(pool, self._place_segment(segment_bytes), segment_bytes)

    def _fits(self, segment_bytes: int) -> bool:
        limit = self._limit_bytes
        return limit is None or self.reserved_bytes + segment_bytes <= limit

    def _place_segment(self, segment_bytes: int) -> int:
        if self._settings.segment_order == "descending":
            self._end_of_addresses -= segment_bytes
            return self._end_of_addresses
        address = self._end_of_addresses
        self._end_of_addresses += segment_bytes
        return address

    def _split(self, block: Block, num_bytes: int) -> None:
        """Cut a block to the request and return the rest to the pool, if the rest is worth it."""
        pool = block.pool
        rest_bytes = block.num_bytes - num_bytes
        if pool.is_small:
            if rest_bytes < MIN_BLOCK_BYTES:
                return
        else:
            cap = self._settings.max_split_bytes
            if rest_bytes <= SMALL_REQUEST_BYTES or (cap is not None and num_bytes >= cap):
                return
        rest = Block(pool, block.address + num_bytes, rest_bytes)
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next = rest
        block.num_bytes = num_bytes
        pool.add(rest)

    def _release(self, block: Block) -> None:
        """Give a segment that is one free block back to the driver."""
        block.pool.remove(block)
        self.reserved_bytes -= block.num_bytes
        self.num_segments -= 1

    def _release_oversize(self, pool: Pool, num_bytes: int) -> bool:
        """Free blocks that may not be split until the request could fit; say whether it could.

        One block that is large enough, or else the largest ones. Without a cap there are none.
        """
        cap = self._settings.max_split_bytes
        if cap is None:
            return False
        wanted_bytes = max(num_bytes, cap)
        place = pool.find(wanted_bytes)
        if place < len(pool.blocks):
            self._release(pool.blocks[place][2])
            return True
        released_bytes = 0
        while pool.blocks and released_bytes < wanted_bytes and pool.blocks[-1][0] >= cap:
            released_bytes += pool.blocks[-1][0]
            self._release(pool.blocks[-1][2])
        return released_bytes >= wanted_bytes


def replay(
    events: Iterable[MemoryEvent],
    *,
    limit_bytes: int | None = None,
    settings: AllocatorSettings = DEFAULT_SETTINGS,
) -> AllocatorResult:
    """Replay allocations and frees in their order, up to the end or to the first out of memory.

    `limit_bytes` is what cudaMalloc can give this process: the GPU's memory less its context,
    communicators and other processes. Requests of zero bytes never reach the allocator.
    """
    allocator = CachingAllocator(limit_bytes, settings)
    live: dict[int, Block | None] = {}
    for index, (kind, block_id, num_bytes, stream) in enumerate(events):
        if kind == "alloc":
            if block_id in live:
                raise ValueError(f"event {index}: allocates block {block_id}, which is in use")
            live[block_id] = block = allocator.allocate(num_bytes, stream) if num_bytes else None
            if block is None and num_bytes:
                return allocator.result(oom_event_index=index)
        else:
            if block_id not in live:
                raise ValueError(f"event {index}: frees block {block_id}, which is not in use")
            block = live.pop(block_id)
            if block is not None:
                allocator.free(block)
    return allocator.result()
