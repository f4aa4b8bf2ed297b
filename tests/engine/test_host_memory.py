"""Regions of host memory: zeros on pages of their own, locked on a GPU machine."""

from __future__ import annotations

import gc
import mmap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fsdpbench.engine import host_memory
from fsdpbench.engine.device import Device
from fsdpbench.engine.host_memory import HostRegions
from fsdpbench.errors import FsdpbenchError


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


def test_memory_that_the_host_lacks_is_an_error_with_a_remedy():
    with pytest.raises(FsdpbenchError, match=r"host memory: [\d.]+ GiB cannot be had .* Use less"):
        HostRegions(Device("cpu")).allocate((1 << 62,), torch.uint8)


class Driver:
    """Registers pages on paper; one call fails, and another waits until it is told."""

    def __init__(self, answers):
        self.answers, self.registered, self.gate = iter(answers), set(), threading.Event()

    def cudaHostRegister(self, address, nbytes, flags):
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        if answer == "wait":
            assert self.gate.wait(10)
        self.registered.add(address)
        return 0

    def cudaHostUnregister(self, address):
        self.registered.remove(address)


@pytest.fixture
def ledger_on(monkeypatch):
    def prepare(*answers):
        driver = Driver(answers)
        monkeypatch.setattr(host_memory, "_cudart", lambda: driver)
        regions = HostRegions(Device("cpu"))
        # as on a GPU, of which only the index is not there
        threads = regions._threads = ThreadPoolExecutor(1)
        for _ in answers:
            region = torch.zeros(16, dtype=torch.uint8)
            regions._pending.append(
                (16, threads.submit(regions._ledger.lock, regions.device, region))
            )
        return driver, regions

    return prepare


def test_a_thread_that_fails_leaves_nothing_locked(ledger_on):
    driver, regions = ledger_on(0, RuntimeError("no context"), 0)
    with pytest.raises(RuntimeError, match="no context"):
        regions.close()
    assert driver.registered == set()
    assert not any(thread.is_alive() for thread in regions._threads._threads)
    regions.close()


def test_what_is_locked_after_the_owner_went_is_unlocked(ledger_on):
    driver, regions = ledger_on(0, "wait", 0)
    threads = regions._threads
    del regions
    gc.collect()
    driver.gate.set()
    threads.shutdown()
    assert driver.registered == set()


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
