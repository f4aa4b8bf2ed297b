import json
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from fsdpbench.bench.predict.allocator import AllocatorSettings, CachingAllocator, replay
from fsdpbench.bench.predict.events import MemoryEvent
from fsdpbench.units import MIB


def alloc(block_id, num_bytes, stream=0):
    return MemoryEvent("alloc", block_id, num_bytes, stream)


def free(block_id, num_bytes=0, stream=0):
    return MemoryEvent("free", block_id, num_bytes, stream)


def events_of(*steps):
    """Write `(1, 3 * MIB)` for an allocation on stream 0 and `-1` for the free of block 1."""
    return [alloc(*step) if isinstance(step, tuple) else free(-step) for step in steps]


def reserved_after(events, settings=None):
    return replay(events, settings=settings or AllocatorSettings()).peak_reserved_bytes


# The dumb reference: segments are lists of cells [num_bytes, owner], found by walking over all.


class Segment:
    def __init__(self, number, stream, is_small, num_bytes):
        self.number, self.stream, self.is_small = number, stream, is_small
        self.cells = [[num_bytes, None]]

    def total_bytes(self):
        return sum(num_bytes for num_bytes, _ in self.cells)


def find_cell(segments, stream, is_small, wanted_bytes, direction):
    """Walk over every free cell; the smallest wins, then the segment's place, then the offset."""
    found = []
    for segment in segments:
        if (segment.stream, segment.is_small) != (stream, is_small):
            continue
        for place, (num_bytes, owner) in enumerate(segment.cells):
            if owner is None and num_bytes >= wanted_bytes:
                found.append((num_bytes, direction * segment.number, place, segment))
    return min(found, key=lambda entry: entry[:3]) if found else None


def reference(events, limit_bytes=None, order="ascending"):
    """Return (peak reserved, peak allocated, most segments, retries, event out of memory)."""
    segments, count, retries = [], 0, 0
    peaks = [0, 0, 0]
    direction = 1 if order == "ascending" else -1
    for index, (kind, block_id, num_bytes, stream) in enumerate(events):
        if kind == "free":
            for segment in segments:
                cells = [
                    [size, None if owner == block_id else owner] for size, owner in segment.cells
                ]
                joined = [cells[0]]
                for cell in cells[1:]:
                    if cell[1] is None and joined[-1][1] is None:
                        joined[-1][0] += cell[0]
                    else:
                        joined.append(cell)
                segment.cells = joined
            continue
        if num_bytes == 0:
            continue
        wanted = (num_bytes + 511) // 512 * 512
        is_small = wanted <= 2**20
        entry = find_cell(segments, stream, is_small, wanted, direction)
        if entry is None:
            new_bytes = 2**21 if is_small else 20 * 2**20
            if wanted >= 10 * 2**20:
                new_bytes = (wanted + 2**21 - 1) // 2**21 * 2**21
            held = sum(segment.total_bytes() for segment in segments)
            if limit_bytes is not None and held + new_bytes > limit_bytes:
                segments = [s for s in segments if any(owner is not None for _, owner in s.cells)]
                retries += 1
                held = sum(segment.total_bytes() for segment in segments)
                if held + new_bytes > limit_bytes:
                    return *peaks, retries, index
            count += 1
            segments.append(Segment(count, stream, is_small, new_bytes))
            entry = (new_bytes, 0, 0, segments[-1])
        found_bytes, _, place, segment = entry
        rest = found_bytes - wanted
        if rest >= 512 if is_small else rest > 2**20:
            segment.cells[place : place + 1] = [[wanted, block_id], [rest, None]]
        else:
            segment.cells[place][1] = block_id
        used = sum(size for s in segments for size, owner in s.cells if owner is not None)
        reserved = sum(s.total_bytes() for s in segments)
        peaks = [max(a, b) for a, b in zip(peaks, (reserved, used, len(segments)), strict=True)]
    return *peaks, retries, None


SIZE_CHOICES = {
    "small": lambda rng: rng.randint(1, 2**20),
    "mixed": lambda rng: int(2 ** rng.uniform(6, 26)),
    "equal": lambda rng: rng.choice([300, 700_000, 2 * MIB, 3 * MIB, 9 * MIB, 11 * MIB, 15 * MIB]),
}


def random_events(seed, sizes, num_events=600, num_streams=2):
    rng = random.Random(seed)
    live, events = [], []
    for block_id in range(num_events):
        if live and rng.random() < 0.47:
            events.append(free(live.pop(rng.randrange(len(live)))))
        else:
            num_bytes = 0 if rng.random() < 0.01 else SIZE_CHOICES[sizes](rng)
            events.append(alloc(block_id, num_bytes, rng.randrange(num_streams)))
            live.append(block_id)
    return events


@pytest.mark.parametrize("order", ["ascending", "descending"])
@pytest.mark.parametrize("sizes", SIZE_CHOICES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [None, 0.8, 0.5])
def test_agrees_with_the_dumb_reference(seed, sizes, order, share):
    events = random_events(seed, sizes)
    limit = None if share is None else int(reference(events)[0] * share)
    expected = reference(events, limit, order)
    found = replay(events, limit_bytes=limit, settings=AllocatorSettings(segment_order=order))
    assert expected == (
        found.peak_reserved_bytes,
        found.peak_allocated_bytes,
        found.num_segments,
        found.num_retries,
        found.oom_event_index,
    )


@pytest.mark.parametrize(
    ("num_bytes", "reserved_bytes", "allocated_bytes"),
    [
        pytest.param(0, 0, 0, id="nothing never reaches the allocator"),
        pytest.param(1, 2 * MIB, 512, id="one byte"),
        pytest.param(513, 2 * MIB, 1024, id="rounded up to 512"),
        pytest.param(MIB, 2 * MIB, MIB, id="largest small request"),
        pytest.param(MIB + 1, 20 * MIB, MIB + 512, id="smallest large request"),
        pytest.param(10 * MIB - 512, 20 * MIB, 10 * MIB - 512, id="last one to share 20 MiB"),
        pytest.param(10 * MIB, 10 * MIB, 10 * MIB, id="first one with a segment of its own"),
        pytest.param(10 * MIB + 512, 12 * MIB, 10 * MIB + 512, id="rest of 2 MiB - 512 is split"),
        pytest.param(11 * MIB, 12 * MIB, 12 * MIB, id="rest of 1 MiB stays and counts"),
        pytest.param(11 * MIB - 512, 12 * MIB, 11 * MIB - 512, id="rest of 1 MiB + 512 is split"),
    ],
)
def test_one_request(num_bytes, reserved_bytes, allocated_bytes):
    found = replay([alloc(1, num_bytes)])
    assert found.peak_reserved_bytes == reserved_bytes
    assert found.peak_allocated_bytes == allocated_bytes


def test_small_rest_of_512_bytes_is_split():
    """2 MiB = 1 MiB + (1 MiB - 512) + 512: three requests, one segment."""
    events = events_of((1, MIB), (2, MIB - 512), (3, 512))
    assert reserved_after(events) == 2 * MIB


def test_small_and_large_requests_never_share():
    """A free 20 MiB segment does not serve 1 MiB: 20 + 2."""
    assert reserved_after(events_of((1, 2 * MIB), -1, (2, MIB))) == 22 * MIB


def test_streams_never_share():
    """The free 20 MiB of stream 0 do not serve stream 1: 20 + 20."""
    assert reserved_after(events_of((1, 2 * MIB), -1, (2, 2 * MIB, 1))) == 40 * MIB
    assert reserved_after(events_of((1, 2 * MIB), -1, (2, 2 * MIB, 0))) == 20 * MIB


def test_a_block_returns_to_the_stream_that_asked_for_it():
    """Wherever the free happens: 20 on stream 1, reused there; stream 0 holds nothing."""
    events = [alloc(1, 2 * MIB, 1), free(1, 2 * MIB, 0), alloc(2, 2 * MIB, 1)]
    assert reserved_after(events) == 20 * MIB


def test_the_smallest_block_that_fits_is_taken():
    """Of free 12 and 16 MiB, 11 MiB takes the 12, so 16 MiB still fits: 12 + 16."""
    events = events_of((1, 16 * MIB), (2, 12 * MIB), -1, -2, (3, 11 * MIB), (4, 16 * MIB))
    assert reserved_after(events) == 28 * MIB


def test_free_neighbours_join():
    """20 = 6 + 6 + 8 rest. Both freed give 20 again, so 18 MiB fits; one of them does not do."""
    both = events_of((1, 6 * MIB), (2, 6 * MIB), -1, -2, (3, 18 * MIB))
    assert reserved_after(both) == 20 * MIB
    one = events_of((1, 6 * MIB), (2, 6 * MIB), -1, (3, 18 * MIB))
    assert reserved_after(one) == 38 * MIB


def test_segments_do_not_join():
    """Two free segments of 12 do not serve 24: 12 + 12 + 24."""
    assert (
        reserved_after(events_of((1, 12 * MIB), (2, 12 * MIB), -1, -2, (3, 24 * MIB))) == 48 * MIB
    )


@pytest.mark.parametrize(("order", "reserved_mib"), [("ascending", 60), ("descending", 40)])
def test_ties_go_to_the_lowest_address(order, reserved_mib):
    """A = 9 + 11 free and B = 9 + 11 free; 11 MiB takes the one that lies lower, then A's 9 goes.

    Ascending that is A's, and 20 MiB finds no place: 20 + 20 + 20. Descending it is B's, so A is
    20 free again and serves: 20 + 20.
    """
    events = events_of(
        (1, 9 * MIB), (2, 11 * MIB), (3, 9 * MIB), -2, (4, 11 * MIB), -1, (5, 20 * MIB)
    )
    assert reserved_after(events, AllocatorSettings(segment_order=order)) == reserved_mib * MIB


def test_cache_goes_back_when_the_memory_is_out():
    """12 free and 12 in use of 30: 16 more do not fit until the free 12 goes back, 12 + 16 = 28."""
    events = events_of((1, 12 * MIB), (2, 12 * MIB), -1, (3, 16 * MIB))
    found = replay(events, limit_bytes=30 * MIB)
    assert (found.num_retries, found.oom_event_index) == (1, None)
    assert found.peak_reserved_bytes == 28 * MIB


def test_a_segment_in_use_does_not_go_back():
    """20 with 2 in use keeps its 18 free: 20 + 20 > 38, out of memory at the third event."""
    events = events_of((1, 2 * MIB), (2, 12 * MIB), -2, (3, 20 * MIB))
    found = replay(events, limit_bytes=38 * MIB)
    assert (found.num_retries, found.oom_event_index) == (1, 3)


def test_fragmentation_is_that_of_the_highest_reserve():
    """At the peak 20 + 32 = 52 are reserved and 2 + 32 = 34 are in use."""
    events = events_of((1, 2 * MIB), (2, 32 * MIB), -2)
    assert replay(events).fragmentation_at_peak == pytest.approx(1 - 34 / 52)


def test_peaks_start_again_for_each_phase():
    allocator = CachingAllocator()
    block = allocator.allocate(30 * MIB, stream=0)
    allocator.free(block)
    allocator.reset_peaks()
    allocator.allocate(10 * MIB, stream=0)
    assert allocator.result().peak_reserved_bytes == 30 * MIB
    assert allocator.result().peak_allocated_bytes == 10 * MIB
    assert allocator.result().fragmentation_at_peak == pytest.approx(1)


def test_blocks_above_the_cap_are_neither_split_nor_lent_to_small_requests():
    """64 free: 50 (above the cap of 32) would waste 14 < 20 and takes it; 12 is under the cap."""
    settings = AllocatorSettings(max_split_bytes=32 * MIB)
    assert reserved_after(events_of((1, 64 * MIB), -1, (2, 50 * MIB)), settings) == 64 * MIB
    assert reserved_after(events_of((1, 64 * MIB), -1, (2, 44 * MIB)), settings) == 108 * MIB
    assert reserved_after(events_of((1, 64 * MIB), -1, (2, 12 * MIB)), settings) == 76 * MIB


def test_only_blocks_above_the_cap_go_back_first():
    """Free 40, 36 and 12 of 100: 90 needs 88 gone, the oversize ones give 76, so the rest goes."""
    settings = AllocatorSettings(max_split_bytes=32 * MIB)
    events = events_of((1, 40 * MIB), (2, 36 * MIB), (3, 12 * MIB), -1, -2, -3)
    some = replay([*events, alloc(4, 70 * MIB)], limit_bytes=100 * MIB, settings=settings)
    assert (some.num_retries, some.oom_event_index) == (0, None)
    every = replay([*events, alloc(4, 90 * MIB)], limit_bytes=100 * MIB, settings=settings)
    assert (every.num_retries, every.oom_event_index) == (1, None)


@pytest.mark.parametrize(
    ("num_bytes", "rounded_bytes"),
    [(1200, 1536), (2048, 2048), (2049, 2560), (5000, 5120), (MIB + 1, MIB + MIB // 4)],
)
def test_rounding_to_divisions_of_powers_of_two(num_bytes, rounded_bytes):
    """Four steps between powers of two; up to 4 x 512 bytes the plain rounding stays."""
    settings = AllocatorSettings(roundup_power2_divisions=4)
    assert replay([alloc(1, num_bytes)], settings=settings).peak_allocated_bytes == rounded_bytes


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (events_of((1, 512), (1, 512)), "event 1: allocates block 1"),
        (events_of((1, 512), -2), "event 1: frees block 2"),
    ],
)
def test_refuses_an_order_that_cannot_be(events, message):
    with pytest.raises(ValueError, match=message):
        replay(events)


@pytest.mark.slow
def test_half_a_million_events_take_seconds():
    events = random_events(1, "mixed", num_events=500_000)
    start = time.process_time()
    replay(events)
    assert time.process_time() - start < 20  # about 3 s on an idle core


# The truth: torch's own allocator, in a process of its own (any torch from 2.11 on).


def carry_out_on_gpu(events, limit_bytes=None):
    environment = {k: v for k, v in os.environ.items() if "ALLOC_CONF" not in k}
    script = Path(__file__).with_name("gpu_allocations.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps({"events": events, "limit_bytes": limit_bytes}),
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def reserved_after_each(events, order):
    allocator = CachingAllocator(settings=AllocatorSettings(segment_order=order))
    live, reserved = {}, []
    for kind, block_id, num_bytes, stream in events:
        if kind == "alloc":
            live[block_id] = allocator.allocate(num_bytes, stream) if num_bytes else None
        elif live[block_id] is not None:
            allocator.free(live[block_id])
        reserved.append(allocator.reserved_bytes)
    return reserved


def differs(result, truth):
    """List the figures on which a replay and torch's statistics differ."""
    return [
        name for name in asdict(result) if name in truth and getattr(result, name) != truth[name]
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", ["small", "mixed"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_gpu_reserves_what_the_replay_says(seed, sizes):
    """Two streams, and sizes for which the order of the segments makes no difference."""
    events = random_events(seed, sizes, num_events=1500)
    reserved = reserved_after_each(events, "ascending")
    assert reserved == reserved_after_each(events, "descending")
    truth = carry_out_on_gpu(events)
    assert not differs(replay(events), truth), truth["peak_reserved_bytes"]
    assert reserved == truth["reserved_bytes"]


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.85, 0.6])
@pytest.mark.parametrize("seed", range(3))
def test_gpu_retries_and_runs_out_where_the_replay_does(seed, share):
    events = random_events(seed, "mixed", num_events=800)
    limit_bytes = int(replay(events).peak_reserved_bytes * share) // MIB * MIB + MIB // 2
    truth = carry_out_on_gpu(events, limit_bytes)
    found = replay(events, limit_bytes=limit_bytes)
    assert not differs(found, truth), (found, truth["peak_reserved_bytes"])


@pytest.mark.gpu
@pytest.mark.parametrize("num_bytes", [9 * MIB, 20 * MIB, 64 * MIB, 600 * MIB])
def test_gpu_puts_segments_where_the_default_order_says(num_bytes):
    """Blocks that fill a segment each, or begin one: their addresses fall or rise throughout."""
    events = [alloc(block_id, num_bytes) for block_id in range(8)]
    truth = carry_out_on_gpu(events)
    addresses = [truth["addresses"][str(block_id)] for block_id in range(8)]
    if num_bytes < 10 * MIB:
        addresses = addresses[::2]  # two of them share a segment
    rising = AllocatorSettings().segment_order == "ascending"
    assert addresses == sorted(addresses, reverse=not rising)
