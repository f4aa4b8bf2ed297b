"""Host storage of shards; that it is page-locked once is seen on a GPU."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from fsdpbench.engine.device import Device
from fsdpbench.engine.host_memory import HostRegions
from fsdpbench.engine.parallel.host_shards import allocate_host_shards, move_into_region
from tests.distributed.pool import run_on_ranks

PAYLOAD = "tests.distributed.payloads.parallel_weights_host"


def test_plain_parameters_get_memory_of_their_own():
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    values = allocate_host_shards(model, dict(model.named_parameters()), Device("cpu"))
    assert {name: tuple(value.shape) for name, value in values.items()} == {
        "weight": (2, 3),
        "bias": (2,),
    }
    assert all(value.device.type == "cpu" for value in values.values())


def test_a_plain_tensor_moves_into_a_region():
    value = torch.empty(3, 2, dtype=torch.bfloat16)
    move_into_region(value, HostRegions(Device("cpu")))
    assert value.shape == (3, 2)
    assert value.dtype == torch.bfloat16
    assert value.sum() == 0  # regions begin as zeros


def test_shards_move_into_regions_and_short_ones_are_told_apart():
    for rank, (moved, full_size) in enumerate(
        run_on_ranks(f"{PAYLOAD}:move_shards", 2, timeout_seconds=60)
    ):
        assert moved
        assert full_size == {"even": True, "short": rank == 0}


@pytest.mark.gpu
def test_offloaded_shards_are_page_locked_once():
    ((locked, kept, same, unlocked),) = run_on_ranks(
        f"{PAYLOAD}:lock_shards", 1, device_type="cuda", timeout_seconds=60
    )
    assert locked
    assert kept  # through the first forward, where FSDP2 would copy what is not locked
    assert same
    assert unlocked
    gc.collect()
