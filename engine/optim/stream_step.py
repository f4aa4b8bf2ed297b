"""The schedule of the per-layer step: three lanes over the blocks, ordered by events alone.

Note: three lanes
The fetch lane copies block after block to the device, the compute lane (the current stream) updates
what has arrived, the store lane copies it back, so that both directions of the bus are busy at
once. Block j may be fetched when block j - prefetch - 1 is updated (that is what "layers ahead"
means) and when block j - prefetch - 2 is stored, whose buffer it takes. The host enqueues all of it
without waiting and then waits once, for the last block to be stored.
"""

from __future__ import annotations

from collections.abc import Callable

from fsdpbench.engine.device import Device

Lane = Callable[[int], None]  # enqueues its part of a block on the current stream


def count_buffers(prefetch_layers: int) -> int:
    """Return how many blocks lie on the device at a time: fetched ahead, updated, stored."""
    return prefetch_layers + 2


def stream_blocks(
    device: Device, num_blocks: int, prefetch_layers: int, *, fetch: Lane, update: Lane, store: Lane
) -> None:
    """Run the three lanes over all blocks; return when everything is stored.

    `fetch` and `store` use buffer `block % count_buffers(prefetch_layers)`; what `update` alone
    reads may use `block % (prefetch_layers + 1)`. See "Note: three lanes".
    """
    compute, fetching, storing = device.current_stream(), device.stream(), device.stream()
    fetched, updated, stored = ([device.event() for _ in range(num_blocks)] for _ in range(3))
    begin = device.event()
    begin.record(compute)
    begin.wait(fetching)  # buffers are of memory that earlier work may still be using
    ahead = 0
    for block in range(num_blocks):
        while ahead < min(num_blocks, block + prefetch_layers + 1):
            if ahead > prefetch_layers:
                updated[ahead - prefetch_layers - 1].wait(fetching)
            if ahead >= count_buffers(prefetch_layers):
                stored[ahead - count_buffers(prefetch_layers)].wait(fetching)
            with device.use_stream(fetching):
                fetch(ahead)
            fetched[ahead].record(fetching)
            ahead += 1
        fetched[block].wait(compute)
        update(block)
        updated[block].record(compute)
        updated[block].wait(storing)
        with device.use_stream(storing):
            store(block)
        stored[block].record(storing)
    if num_blocks:
        stored[-1].synchronize()
