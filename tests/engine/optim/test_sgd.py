"""SGD against torch's plain loop."""

from __future__ import annotations

import pytest
import torch

from fsdpbench.engine.optim.clip import gradient_norm, plan_clipping
from fsdpbench.engine.optim.sgd import SGD


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_equals_torchs_plain_loop(max_norm):
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3), (0,), (17,)]
    ours = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    optimizer = SGD(ours, lr=0.1, weight_decay=0.2)
    reference = torch.optim.SGD(theirs, lr=0.1, weight_decay=0.2, foreach=False)
    for _ in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        verdict = plan_clipping(gradient_norm(ours), max_norm)
        optimizer.step(clip=verdict)
        if max_norm:
            torch.nn.utils.clip_grad_norm_(theirs, max_norm, foreach=False)
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_keeps_no_state():
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = SGD([param])
    param.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state_dict()["state"] == {}
