"""The device module on the CPU, on a made-up out-of-tree device and on a GPU."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap

import pytest
import torch

from fsdpbench.engine.device import Device, DeviceMemory
from fsdpbench.errors import ConfigError


def test_cpu_streams_events_and_memory_do_nothing():
    device = Device("cpu")
    assert device.torch_device == torch.device("cpu")
    assert not device.is_asynchronous
    device.make_current()
    with device.use_stream(device.stream()):
        event = device.event(timing=True)
        event.record(device.current_stream())
    event.synchronize()
    device.synchronize()
    device.reset_peaks()
    device.empty_cache()
    assert device.memory_stats() == DeviceMemory()
    tensor = torch.ones(3)
    assert device.to_device(tensor) is tensor


@pytest.mark.parametrize("kind", ["cdua", "cuda:0", ""])
def test_unknown_type_is_refused(kind):
    with pytest.raises(ConfigError, match=f"device='{kind}': cpu, cuda"):
        Device(kind)


def test_memory_snapshots_need_a_device_that_records_them(tmp_path):
    with pytest.raises(ConfigError, match="device='cpu': memory snapshots need"):
        Device("cpu").memory_snapshot_start()
    with pytest.raises(ConfigError, match="device='cpu': memory snapshots need"):
        Device("cpu").memory_snapshot_stop(tmp_path / "snapshot.pickle")
    assert not list(tmp_path.iterdir())


def test_devices_are_values():
    assert Device("cpu") == Device("cpu", None)
    assert len({Device("cpu", 0), Device("cpu", 0), Device("cpu", 1)}) == 2
    assert pickle.loads(pickle.dumps(Device("cpu", 0))) == Device("cpu", 0)


OUT_OF_TREE = """
    import sys, types, torch

    class Stream:
        def __init__(self, device): self.device = device

    module = types.ModuleType("torch.pebble")
    calls = []
    module.is_available = lambda: True
    module.Stream = Stream
    module.current_stream = lambda device: ("current", device)
    module.Event = lambda enable_timing: ("event", enable_timing)
    module.synchronize = lambda device: calls.append(("synchronize", device))
    module.set_device = lambda index: calls.append(("set_device", index))
    module.memory_stats = lambda device: {"allocated_bytes.all.peak": 7, "num_alloc_retries": 2}
    torch.utils.rename_privateuse1_backend("pebble")
    torch._register_device_module("pebble", module)

    from fsdpbench.engine.device import Device, DeviceMemory
    device = Device("pebble", 1)
    there = torch.device("pebble", 1)
    assert device.torch_device == there and device.is_asynchronous
    assert device.stream().device == there
    assert device.current_stream() == ("current", there)
    assert device.event(timing=True) == ("event", True)
    device.make_current(); device.synchronize(); device.reset_peaks(); device.empty_cache()
    assert calls == [("set_device", 1), ("synchronize", there)]
    assert device.memory_stats() == DeviceMemory(peak_allocated_bytes=7, num_alloc_retries=2)
"""


def test_a_device_that_an_extension_registers():
    code = textwrap.dedent(OUT_OF_TREE)  # in a process of its own: the name cannot be taken back
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_gpu_memory_copies_and_events(tmp_path):
    device = Device("cuda", 0)
    device.make_current()
    device.memory_snapshot_start()
    device.reset_peaks()
    before = device.memory_stats()
    block = device.to_device(torch.ones(1 << 20))
    assert block.device == torch.device("cuda", 0)
    after = device.memory_stats()
    assert after.allocated_bytes - before.allocated_bytes == 4 << 20
    assert after.peak_allocated_bytes >= after.allocated_bytes
    assert after.reserved_bytes >= after.allocated_bytes
    assert 0 < after.free_bytes < after.total_bytes
    del block
    device.reset_peaks()
    assert device.memory_stats().peak_allocated_bytes == before.allocated_bytes
    start, end = device.event(timing=True), device.event(timing=True)
    side = device.stream()
    start.record(side)
    with device.use_stream(side):
        assert device.current_stream() == side
        torch.ones(1 << 20, device="cuda").sum()
    end.record(side)
    end.synchronize()
    assert start.elapsed_time(end) > 0
    snapshot = device.memory_snapshot_stop(tmp_path / "deep" / "snapshot.pickle")
    assert pickle.loads(snapshot.read_bytes())["device_traces"][0]
