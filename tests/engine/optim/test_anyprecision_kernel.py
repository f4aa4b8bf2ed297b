"""The Triton kernel against the chunked form, which test_anyprecision holds to a loop."""

from __future__ import annotations

import pytest
import torch

from fsdpbench.engine.optim.anyprecision import AnyPrecisionAdamW
from fsdpbench.engine.optim.clip import gradient_norm, plan_clipping

SHAPES = [(3, 5), (0,), (1,), (100, 77), (4096, 33), ()]


def train(fused, dtype, steps, poisoned=(), max_norm=0.5):
    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(shape):
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    params = [torch.nn.Parameter(draw(shape)) for shape in SHAPES]
    optimizer = AnyPrecisionAdamW(params, lr=0.01, weight_decay=0.1, fused=fused)
    for step in range(steps):
        for param in params:
            param.grad = draw(param.shape)
        if step in poisoned:
            params[3].grad[1, 1] = torch.nan
        before = [p.detach().clone() for p in params]
        optimizer.step(clip=plan_clipping(gradient_norm(params), max_norm))
        if step in poisoned:
            assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
    return params, [optimizer.state[param] for param in params]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("max_norm", [0.5, None])
def test_kernel_equals_chunks(dtype, max_norm):
    ours, our_states = train(True, dtype, 6, poisoned=(2,), max_norm=max_norm)
    theirs, their_states = train(False, dtype, 6, poisoned=(2,), max_norm=max_norm)
    for a, b, state, other in zip(ours, theirs, our_states, their_states, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-4)
        assert sorted(state) == sorted(other)
        assert ("compensation" in state) == (dtype == torch.bfloat16)
        assert state["step"].item() == other["step"].item() == 5.0
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(state[name], other[name], rtol=2**-6, atol=1e-6)
            if a.numel() > 1000:  # a value next to a tie may round the other way
                assert (state[name] == other[name]).float().mean() > 0.97
        if a.numel() > 1000 and dtype == torch.bfloat16:
            assert (a == b).float().mean() > 0.97
            # what the weights lack is in the compensation
            whole = a.float() + state["compensation"].float()
            torch.testing.assert_close(
                whole, b.float() + other["compensation"].float(), rtol=1e-5, atol=1e-4
            )
