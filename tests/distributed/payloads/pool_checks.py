"""Payloads that prove the pool itself: results, errors, deaths and fresh groups."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist


def sum_ranks(rank: int, world_size: int, offset: int = 0) -> tuple[int, int]:
    value = torch.tensor([rank + offset])
    dist.all_reduce(value)
    return int(value.item()), os.getpid()


def fail_on(rank: int, world_size: int, failing_rank: int) -> None:
    if rank == failing_rank:
        raise ValueError("planned failure")
    dist.barrier()


def die(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)


def sleep(rank: int, world_size: int, seconds: float) -> None:
    time.sleep(seconds)
