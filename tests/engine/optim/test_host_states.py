"""States side by side in regions, seen as tensors laid out like their parameter."""

from __future__ import annotations

import torch

from fsdpbench.engine.device import Device
from fsdpbench.engine.host_memory import HostRegions
from fsdpbench.engine.optim.host_states import allocate_host_states, lay_out_as
from fsdpbench.engine.optim.multi_tensor import Piece
from fsdpbench.engine.optim.stream_plan import plan_blocks
from fsdpbench.engine.optim.transfers import plan_stage

NAMES = ("exp_avg", "exp_avg_sq")


def allocate(lengths, units, dtype=torch.float32):
    blocks = plan_blocks(lengths, units)
    dtypes = [dict.fromkeys(NAMES, dtype)] * len(lengths)
    return blocks, allocate_host_states(HostRegions(Device("cpu")), blocks, lengths, dtypes)


def test_a_whole_block_is_one_copy_and_a_cut_parameter_one_run():
    lengths = [3000, 30, 700, 0, 400]
    blocks, states = allocate(lengths, [[1, 2, 3], [4]])
    spans = [states[p.index].span(name, p) for p in blocks[0] for name in NAMES]
    assert len(plan_stage(spans).copies) == 1
    assert sum(len(block) > 0 and block[0].index == 0 for block in blocks) > 1
    for state, length in zip(states, lengths, strict=True):
        for name in NAMES:
            assert state.flat(name).shape == (length,)
            assert not state.flat(name).any()
    part = states[0].span("exp_avg_sq", Piece(0, 1024, 100))
    states[0].flat("exp_avg_sq")[1024:1124] = 5.0
    run = states[0].region[part.start : part.start + part.nbytes].view(torch.float32)
    assert torch.equal(run, torch.full((100,), 5.0))
    assert not states[0].flat("exp_avg").any()


def test_states_are_laid_out_as_the_parameter():
    for param in (torch.randn(4, 6).t(), torch.randn(()), torch.randn(3, 2), torch.empty(0, 4)):
        _, (state,) = allocate([param.numel()], [], torch.bfloat16)
        shown = lay_out_as(param, state.flat("exp_avg_sq"))
        assert shown.shape == param.shape
        assert shown.stride() == param.stride()
        assert shown.dtype == torch.bfloat16
        state.flat("exp_avg_sq").fill_(3.0)
        assert bool((shown == 3).all())
