"""Facts of this machine that a check compares with, read without torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

from fsdpbench.bench.environment import list_gpus


@dataclass(frozen=True)
class Machine:
    """One machine; `gpu_bytes` is the smallest GPU's memory."""

    num_gpus: int
    num_cores: int
    memory_bytes: int
    gpu_bytes: int | None = None
    gpu_name: str | None = None


def read_machine() -> Machine:
    """Read GPUs, cores that this process may use, and host memory."""
    gpus, _ = list_gpus()
    smallest = min(gpus, key=lambda gpu: gpu.total_bytes, default=None)
    return Machine(
        num_gpus=len(gpus),
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        gpu_bytes=smallest.total_bytes if smallest else None,
        gpu_name=smallest.name if smallest else None,
    )
