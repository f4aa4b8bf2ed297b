"""Engine-level offload: storages empty and come back, and training goes on bit for bit."""

from __future__ import annotations

import pytest
import torch

from fsdpbench.engine.device import Device
from fsdpbench.engine.offload import EngineMemory, Residence
from fsdpbench.engine.optim.adamw import AdamW
from fsdpbench.errors import FsdpbenchError
from tests.distributed.pool import run_on_ranks

PAYLOADS = "tests.distributed.payloads.optim_offload"
KINDS = ["adam", "adam_bf16", "sgd", "streamed"]


def make_memory(device="cpu"):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.BatchNorm1d(300)).to(device)
    optimizer = AdamW(model.parameters())
    model(torch.randn(4, 8, device=device)).square().sum().backward()
    optimizer.step()
    return model, EngineMemory(model, optimizer, Device(device))


def snapshot(memory):
    return [tensor.detach().clone() for tensor in memory._tensors()]


def sizes_of(memory):
    return {tensor.untyped_storage().nbytes() for tensor in memory._tensors()}


def test_everything_leaves_and_comes_back():
    model, memory = make_memory()
    before, identities = snapshot(memory), [id(tensor) for tensor in memory._tensors()]
    views = [param.detach().view(-1) for param in model.parameters()]
    assert memory.residence is Residence.DEVICE
    memory.offload()
    memory.offload()
    assert memory.is_offloaded
    assert sizes_of(memory) == {0}
    memory.onload()
    memory.onload()
    assert not memory.is_offloaded
    assert [id(tensor) for tensor in memory._tensors()] == identities
    for old, new in zip(before, memory._tensors(), strict=True):
        assert torch.equal(old, new)
    for view, param in zip(views, model.parameters(), strict=True):
        assert view.data_ptr() == param.data_ptr()


def test_host_memory_is_kept_for_the_next_time_and_grows_when_needed():
    model, memory = make_memory()
    memory.offload()
    slabs = list(memory._slabs)
    memory.onload()
    memory.offload()
    assert [slab.data_ptr() for slab in memory._slabs] == [slab.data_ptr() for slab in slabs]
    memory.onload()
    model.register_buffer("late", torch.arange(100_000.0))
    memory.offload()
    assert len(memory._slabs) == len(slabs) + 1
    memory.onload()
    assert torch.equal(model.late, torch.arange(100_000.0))
    memory.close()
    memory.close()


def test_contexts_nest_and_restore():
    _, memory = make_memory()
    with memory.offloaded():
        with memory.offloaded():
            assert memory.is_offloaded
        assert memory.is_offloaded
        with memory.onloaded():
            memory.check_onloaded("save")
            with memory.offloaded():
                assert memory.is_offloaded
            assert not memory.is_offloaded
        assert memory.is_offloaded
        with pytest.raises(KeyError), memory.onloaded():
            raise KeyError
        assert memory.is_offloaded
    assert not memory.is_offloaded


def test_use_while_offloaded_is_refused():
    _, memory = make_memory()
    memory.check_onloaded("train_batch")
    with memory.offloaded(), pytest.raises(FsdpbenchError, match=r"train_batch: .* onload\(\)"):
        memory.check_onloaded("train_batch")


def test_an_onload_without_room_leaves_the_engine_offloaded_and_whole():
    _, memory = make_memory()
    before = snapshot(memory)
    memory.offload()
    fixed = torch.frombuffer(bytearray(16), dtype=torch.uint8)  # cannot get memory
    memory._parked.append((fixed[:8], torch.zeros(8, dtype=torch.uint8)))
    with pytest.raises(RuntimeError, match="resiz"):
        memory.onload()
    assert memory.is_offloaded
    assert sizes_of(memory) == {0}
    memory._parked.pop()
    memory.onload()
    for old, new in zip(before, memory._tensors(), strict=True):
        assert torch.equal(old, new)


def test_an_engine_without_optimizer_and_storages_of_others():
    model = torch.nn.Linear(3, 3)
    foreign = torch.frombuffer(bytearray(12), dtype=torch.float32)
    model.register_buffer("foreign", foreign)
    memory = EngineMemory(model, None, Device("cpu"))
    with memory.offloaded():
        assert model.weight.untyped_storage().nbytes() == 0
        assert foreign.sum().item() == 0.0
    assert model(torch.ones(3)).shape == (3,)


def test_sharded_training_goes_on_bit_for_bit():
    for results in run_on_ranks(f"{PAYLOADS}:train_around_offloads", 2, timeout_seconds=60):
        assert results == dict.fromkeys(KINDS, (True, True, True))


def test_ranks_move_together_or_not_at_all():
    failing, peer = run_on_ranks(f"{PAYLOADS}:move_without_room", 2, timeout_seconds=60)
    assert failing["offload"] == "OSError: no room"
    assert peer["offload"] == "PeerError: offload failed on rank 0: OSError: no room"
    assert failing["onload"] == "OSError: no room"
    assert peer["onload"] == "PeerError: onload failed on rank 0: OSError: no room"
    for found in (failing, peer):
        assert found["states"] == [False, True, False, False]
        assert found["whole"]
    assert failing["body"] == "KeyError: 'alone'"  # although its peer stays in the body


@pytest.mark.gpu
@pytest.mark.parametrize("offload_params", [False, True])
def test_sharded_training_goes_on_on_a_gpu(offload_params):
    (results,) = run_on_ranks(
        f"{PAYLOADS}:train_around_offloads",
        1,
        timeout_seconds=60,
        device="cuda",
        device_type="cuda",
        offload_params=offload_params,
    )
    # under offload_params parameters and gradients are on the host anyway and keep their storage
    assert results == dict.fromkeys(KINDS, (not offload_params, True, True))


@pytest.mark.gpu
def test_device_memory_is_really_free():
    device = Device("cuda", 0)
    torch.cuda.init()
    device.empty_cache()
    before = device.memory_stats()
    free = before.free_bytes
    model = torch.nn.Linear(8192, 8192, device="cuda")
    memory = EngineMemory(model, AdamW(model.parameters()), device)
    model.weight.grad = torch.ones_like(model.weight)
    memory.optimizer.step()
    assert free - device.memory_stats().free_bytes >= 4 * model.weight.nbytes
    with memory.offloaded():
        stats = device.memory_stats()
        assert stats.allocated_bytes - before.allocated_bytes < 1 << 20
        assert free - stats.free_bytes < 64 << 20
        assert all(slab.is_pinned() for slab in memory._slabs)
    assert torch.isfinite(model.weight).all()
    memory.close()
