"""Regions of host memory: zeros on pages of their own, locked on a GPU machine."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch

from fsdpbench.engine.device import Device
from fsdpbench.engine.host_memory import HostRegions


@pytest.mark.parametrize("shape", [(3, 5), (4096,), (), (0, 4), (1000, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_regions_are_contiguous_zeros_on_their_own_pages(shape, dtype):
    regions = HostRegions(Device("cpu"))
    region, other = regions.allocate(shape, dtype), regions.allocate(shape, dtype)
    assert region.shape == shape
    assert region.dtype == dtype
    assert region.is_contiguous()
    assert not region.any()
    if region.numel():
        assert region.data_ptr() % mmap.PAGESIZE == 0
        assert region.untyped_storage().nbytes() % mmap.PAGESIZE == 0
    region.fill_(1)
    assert not other.any()


def test_regions_outlive_their_owner():
    regions = HostRegions(Device("cpu"))
    region = regions.allocate((7,), torch.float32).fill_(2.0)
    regions.wait()
    regions.close()
    regions.close()
    assert region.sum() == 14.0
    orphan = HostRegions(Device("cpu")).allocate((7,), torch.float32)
    gc.collect()
    assert orphan.add_(1).sum() == 7.0


@pytest.mark.gpu
def test_regions_are_locked_and_unlocked():
    regions = HostRegions(Device("cuda", 0))
    region = regions.allocate((1 << 20,), torch.float32)
    small = regions.allocate((3,), torch.float32)
    regions.wait()
    assert region.is_pinned()
    assert small.is_pinned()
    there = torch.ones(1 << 20, device="cuda")
    region.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert region.sum().item() == 1 << 20
    regions.close()
    assert not region.is_pinned()
    assert region.sum().item() == 1 << 20


@pytest.mark.gpu
def test_an_owner_that_is_dropped_while_locking_unlocks():
    regions = HostRegions(Device("cuda"))
    region = regions.allocate((1 << 24,), torch.float32)
    threads = regions._threads
    del regions
    gc.collect()
    threads.shutdown()
    assert not region.is_pinned()
