import pytest
import torch

from fsdpbench.bench.recorders.allocator import AllocatorRecorder
from fsdpbench.engine.device import Device


def test_cpu_says_why_there_is_nothing():
    assert "cpu" in AllocatorRecorder(Device("cpu")).unavailable


class BrokenDevice:
    type = "cuda"
    is_asynchronous = True

    def memory_stats(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with")


def test_a_device_in_an_error_state_does_not_end_the_sampling():
    sample = AllocatorRecorder(BrokenDevice()).sample()
    assert sample == {"refused": "CUDA error: an illegal memory access was encountered"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_counts_device_memory():
    device = Device("cuda", 0)
    recorder = AllocatorRecorder(device)
    assert recorder.unavailable is None
    before = recorder.sample()["allocated_bytes"]
    block = torch.empty(32 << 20, dtype=torch.uint8, device=device.torch_device)
    sample = recorder.sample()
    assert sample["allocated_bytes"] == before + (32 << 20)
    assert sample["reserved_bytes"] >= sample["allocated_bytes"]
    del block
    after = recorder.sample()
    assert after["allocated_bytes"] == before
    assert after["peak_allocated_bytes"] >= before + (32 << 20)
