"""The three lanes on a made-up device that runs its streams in every possible disorder."""

from __future__ import annotations

import random
from collections import deque
from contextlib import contextmanager

import pytest

from fsdpbench.engine.device import Device
from fsdpbench.engine.optim.stream_step import count_buffers, stream_blocks


class FakeEvent:
    """Done when the queue entry that records it has run."""

    def __init__(self, device):
        self.device, self.done = device, False

    def record(self, stream):
        stream.append(("record", self))

    def wait(self, stream):
        stream.append(("wait", self))

    def synchronize(self):
        self.device.run_until(self)


class FakeDevice:
    """Streams are queues; whichever head can run may run next."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.current = deque()
        self.streams = [self.current]

    def stream(self):
        self.streams.append(deque())
        return self.streams[-1]

    def current_stream(self):
        return self.current

    def event(self):
        return FakeEvent(self)

    @contextmanager
    def use_stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def launch(self, work):
        self.current.append(("work", work))

    def run_until(self, event):
        while not event.done:
            ready = [s for s in self.streams if s and (s[0][0] != "wait" or s[0][1].done)]
            kind, what = self.draw.choice(ready).popleft()
            if kind == "record":
                what.done = True
            elif kind == "work":
                what()


def stream_in_disorder(seed, num_blocks, prefetch):
    """Run lanes that add 100 * block to host[block] = block; return the host and the order."""
    device = FakeDevice(seed)
    host = list(range(num_blocks))
    kept = [None] * count_buffers(prefetch)
    read_only = [None] * (prefetch + 1)
    updated = []

    def fetch(block):
        def work():
            assert block - len(updated) <= prefetch  # no further ahead than asked for
            kept[block % len(kept)] = host[block]
            read_only[block % len(read_only)] = 100 * block

        device.launch(work)

    def update(block):
        def work():
            kept[block % len(kept)] += read_only[block % len(read_only)]
            updated.append(block)

        device.launch(work)

    def store(block):
        device.launch(lambda: host.__setitem__(block, kept[block % len(kept)]))

    stream_blocks(device, num_blocks, prefetch, fetch=fetch, update=update, store=store)
    return host, updated


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("num_blocks", [1, 2, 9])
def test_no_order_of_the_streams_breaks_a_block(num_blocks, prefetch):
    for seed in range(30):
        host, updated = stream_in_disorder(seed, num_blocks, prefetch)
        assert host == [101 * block for block in range(num_blocks)]
        assert updated == list(range(num_blocks))


@pytest.mark.parametrize("seed", range(10))
def test_the_fetch_lane_waits_for_earlier_work_of_the_compute_stream(seed):
    device = FakeDevice(seed)
    seen = []
    device.launch(lambda: seen.append("earlier"))
    stream_blocks(
        device,
        1,
        1,
        fetch=lambda block: device.launch(lambda: seen.append("fetch")),
        update=lambda block: None,
        store=lambda block: None,
    )
    assert seen == ["earlier", "fetch"]


def test_nothing_to_stream():
    stream_blocks(Device("cpu"), 0, 1, fetch=None, update=None, store=None)
