"""What the wire and the disk give when nothing else is done: the limits of weight updates.

Measured in the run whose updates are compared with them, between the same processes and devices,
and in the folder that the versions go to.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fsdpbench.engine.device import Device
from fsdpbench.engine.rollout.local import LocalEngine
from fsdpbench.engine.weight_sync.fanout import Fanout
from fsdpbench.engine.weight_sync.groups import WeightGroup

MESSAGE_BYTES = {"cpu": 32 << 20}
DEVICE_MESSAGE_BYTES = 256 << 20
NUM_MESSAGES = 9
NUM_WARMUPS = 2
DISK_BYTES = 2 << 30  # at most: enough for a rate
DISK_THREADS = 8
CHUNK_BYTES = 8 << 20


def measure_broadcast(
    receivers: Sequence[LocalEngine], device: Device, timeout_seconds: float
) -> float:
    """Return bytes per second of large flat messages to all receivers: the median of several.

    The group has the members of the one for weights, and is gone afterwards. Rank 0 calls it.
    """
    num_bytes = MESSAGE_BYTES.get(device.type, DEVICE_MESSAGE_BYTES)
    count = NUM_WARMUPS + NUM_MESSAGES
    fanout = Fanout(receivers, timeout_seconds)
    group = WeightGroup.listen("limit", 1 + len(receivers), device, timeout_seconds)
    try:
        joins = fanout.begin(
            lambda index, receiver: receiver.init_weights_update_group(group.address_for(1 + index))
        )
        group.join(lambda: fanout.raise_failures("joining", joins))
        fanout.collect("joining", joins)
        takes = fanout.begin(lambda index, _: receivers[index].rehearse_broadcast(num_bytes, count))
        seconds = time_broadcasts(
            group, device, num_bytes, count, lambda: fanout.raise_failures("measuring", takes)
        )
        fanout.collect("measuring", takes)
    except BaseException:
        group.abort()  # members may be in the midst of a message
        raise
    finally:
        fanout.ask(lambda receiver: receiver.destroy_weights_update_group())
        group.close()
    return num_bytes / median(seconds[NUM_WARMUPS:])


def time_broadcasts(
    group: WeightGroup,
    device: Device,
    num_bytes: int,
    count: int,
    check: Callable[[], None] | None = None,
) -> list[float]:
    """Return the seconds of each message; on a device they follow each other without the host.

    `check` is called now and then and may raise to give up.
    """
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device.torch_device)
    if not device.is_asynchronous:
        return [_time(lambda: group.broadcast(message).wait(check)) for _ in range(count)]
    marks = [device.event(timing=True) for _ in range(count + 1)]
    device.synchronize()
    stream = device.current_stream()
    marks[0].record(stream)
    for mark in marks[1:]:
        pending = group.broadcast(message)
        pending.work.wait()  # the current stream's wait, not the host's
        mark.record(stream)
    pending.wait(check)
    device.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(marks)]


def measure_disk(folder: Path, num_bytes: int) -> tuple[float, float]:
    """Return bytes per second of plain writes and reads, with threads; the folder is removed.

    Nothing is flushed and the page cache is left alone, as in an update.
    """
    share = max(1, min(num_bytes, DISK_BYTES) // DISK_THREADS)
    files = [folder / f"plain{index}" for index in range(DISK_THREADS)]
    folder.mkdir(parents=True)
    try:
        with ThreadPoolExecutor(DISK_THREADS) as pool:
            write = _time(lambda: list(pool.map(lambda file: write_plain(file, share), files)))
            read = _time(lambda: list(pool.map(read_plain, files)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return share * DISK_THREADS / write, share * DISK_THREADS / read


def write_plain(file: Path, num_bytes: int) -> None:
    """Write a file of zeros."""
    chunk = memoryview(bytes(CHUNK_BYTES))
    with file.open("wb", buffering=0) as target:
        while num_bytes > 0:
            num_bytes -= target.write(chunk[:num_bytes])


def read_plain(file: Path) -> None:
    """Read a file and keep nothing."""
    chunk = bytearray(CHUNK_BYTES)
    with file.open("rb", buffering=0) as source:
        while source.readinto(chunk):
            pass


def _time(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
