"""The Triton kernel against the chunked form, which test_anyprecision holds to a loop."""

from __future__ import annotations

import pytest
import torch

from fsdpbench.engine.optim.anyprecision import AnyPrecisionAdamW
from fsdpbench.engine.optim.clip import gradient_norm, plan_clipping

SHAPES = [(3, 5), (0,), (1,), (100, 77), (4096, 33), ()]


def train(fused, dtype, moments, max_norm, poisoned=2):
    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(shape):
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    params = [torch.nn.Parameter(draw(shape)) for shape in SHAPES]
    kinds = {"momentum_dtype": moments, "variance_dtype": moments, "compensation_dtype": moments}
    optimizer = AnyPrecisionAdamW(params, lr=0.01, weight_decay=0.1, fused=fused, **kinds)
    for step in range(6):
        for param in params:
            param.grad = draw(param.shape)
        if step == poisoned:
            params[3].grad[1, 1] = torch.nan
        before = [p.detach().clone() for p in params]
        optimizer.step(clip=plan_clipping(gradient_norm(params), max_norm))
        if step == poisoned:
            assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
    return params, [optimizer.state[param] for param in params]


def check_close(ours, theirs, rounded):
    if not rounded:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    elif ours.numel() > 1000:  # a value next to a tie may round the other way
        assert (ours == theirs).float().mean() > 0.97


@pytest.mark.gpu
@pytest.mark.parametrize("max_norm", [0.5, None])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_equals_chunks(dtype, moments, max_norm):
    ours, our_states = train(True, dtype, moments, max_norm)
    theirs, their_states = train(False, dtype, moments, max_norm)
    for a, b, state, other in zip(ours, theirs, our_states, their_states, strict=True):
        a, b = a.detach(), b.detach()
        assert sorted(state) == sorted(other)
        assert ("compensation" in state) == (dtype == torch.bfloat16)
        assert state["step"].item() == other["step"].item() == 5.0
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2e-3)
        if moments == torch.float32:
            check_close(a, b, rounded=dtype == torch.bfloat16)
        for name in ("exp_avg", "exp_avg_sq"):
            check_close(state[name], other[name], rounded=moments == torch.bfloat16)
        if dtype == torch.bfloat16 and moments == torch.float32:
            # what the weights lack is in the compensation
            whole = a.float() + state["compensation"]
            torch.testing.assert_close(
                whole, b.float() + other["compensation"], rtol=1e-5, atol=1e-5
            )
