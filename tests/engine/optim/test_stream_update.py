"""What of a block travels, in how many copies, and how much device memory that takes."""

from __future__ import annotations

import pytest
import torch

from fsdpbench.engine.device import Device
from fsdpbench.engine.host_memory import HostRegions
from fsdpbench.engine.optim.host_states import allocate_host_states
from fsdpbench.engine.optim.sharded import StepGuard
from fsdpbench.engine.optim.stream_plan import plan_blocks
from fsdpbench.engine.optim.stream_update import BlockStager, StreamedUpdate

SIZES = [(256, 64), (64,), (64, 256)]
GROUP = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def stage_layers(num_layers, travels):
    params = [torch.nn.Parameter(torch.randn(size)) for _ in range(num_layers) for size in SIZES]
    for param in params:
        param.grad = torch.randn_like(param)
    lengths = [param.numel() for param in params]
    units = [range(3 * layer, 3 * layer + 3) for layer in range(num_layers)]
    blocks = plan_blocks(lengths, units)
    dtypes = [dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.float32)] * len(params)
    states = allocate_host_states(HostRegions(Device("cpu")), blocks, lengths, dtypes)
    return params, blocks, BlockStager(params, states, lambda _: travels)


def make_update(blocks, stager, prefetch=1, returned=None):
    steps = torch.zeros(sum(map(len, blocks)))
    guard = StepGuard(None, None)
    return StreamedUpdate(Device("cpu"), blocks, stager, prefetch, GROUP, guard, steps, returned)


@pytest.mark.parametrize("travels", [False, True], ids=["weights_there", "weights_travel"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_buffers_take_less_than_prefetch_plus_two_blocks(prefetch, travels):
    params, blocks, stager = stage_layers(6, travels)
    with torch.no_grad():
        staged = [stager.stage(block) for block in blocks]
    assert [len(block.returning.copies) for block in staged] == [4 if travels else 1] * 6
    assert [len(block.fetched_only.copies) for block in staged] == [3 if travels else 0] * 6
    planned = [(block.returning.nbytes, block.fetched_only.nbytes) for block in staged]
    assert planned == [stager.measure(block) for block in blocks]
    work = make_update(blocks, stager, prefetch)
    rings = (work.returning, work.fetched_only)
    used = sum(buffer.numel() for ring in rings for buffer in ring.buffers)
    block_bytes = 16 * sum(param.numel() for param in params[:3])  # weight, gradient, moments
    assert 0 < used < (prefetch + 2) * block_bytes


def test_few_blocks_need_few_buffers():
    _, blocks, stager = stage_layers(1, True)
    work = make_update(blocks, stager, prefetch=5)
    assert len(work.returning.buffers) == len(work.fetched_only.buffers) == 1


def test_resident_weights_are_updated_in_place_and_staged_ones_by_the_store():
    for travels in (False, True):
        params, blocks, stager = stage_layers(1, travels)
        before = [param.detach().clone() for param in params]
        returned = torch.empty(3)
        work = make_update(blocks, stager, returned=returned)
        with torch.no_grad():
            work.fetch(0)
            work.update(0)
            moved = [not torch.equal(a, b) for a, b in zip(params, before, strict=True)]
            assert moved == [not travels] * 3
            work.store(0)
        assert not any(torch.equal(a, b) for a, b in zip(params, before, strict=True))
        assert returned.tolist() == [1.0, 1.0, 1.0]
