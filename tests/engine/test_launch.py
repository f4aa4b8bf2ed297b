"""A lone process becomes a world of one; an existing group is left alone."""

from __future__ import annotations

import subprocess
import sys

from tests.distributed.pool import run_on_ranks

LONE = """
import torch.distributed as dist
from fsdpbench.engine.launch import join_process_group, leave_process_group
device, made = join_process_group("cpu")
again, second = join_process_group("cpu")
leave_process_group()
leave_process_group()
print(device.type, made, second, dist.is_initialized())
"""


def test_a_lone_process_is_a_world_of_one():
    done = subprocess.run([sys.executable, "-c", LONE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["cpu", "True", "False", "False"]


def test_an_existing_group_is_used_and_kept():
    results = run_on_ranks("tests.distributed.payloads.engine_steps:join_twice", 2)
    assert results == [(False, True)] * 2
