"""AdamW against torch's plain loop; nothing in a step is read by the host."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpbench.engine.config.optimizer import OptimizerConfig
from fsdpbench.engine.optim.adamw import AdamW
from fsdpbench.engine.optim.build import build_optimizer
from fsdpbench.engine.optim.clip import gradient_norm, plan_clipping

SHAPES = [(5, 3), (1,), (0, 4), (), (33,), (2, 3, 4)]
SETTINGS = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def make_params(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float32).to(dtype))
        for s in SHAPES
    ]


def give_gradients(params, generator, size=1.0):
    for param in params:
        grad = size * torch.randn(param.shape, generator=generator)
        param.grad = grad.to(param.dtype)


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_equals_torchs_plain_loop(max_norm):
    ours, theirs = make_params(), make_params()
    optimizer = AdamW(ours, **SETTINGS)
    reference = torch.optim.AdamW(theirs, **SETTINGS, foreach=False)
    first, second = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    for _ in range(10):
        give_gradients(ours, first)
        give_gradients(theirs, second)
        verdict = plan_clipping(gradient_norm(ours), max_norm)
        optimizer.step(clip=verdict)
        if max_norm:
            torch.nn.utils.clip_grad_norm_(theirs, max_norm, foreach=False)
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        for name, value in reference.state[b].items():
            torch.testing.assert_close(optimizer.state[a][name], value, rtol=1e-5, atol=1e-9)


def test_a_transposed_parameter_and_gradients_of_other_strides():
    value = torch.randn(4, 3)
    ours, theirs = torch.nn.Parameter(value.t()), torch.nn.Parameter(value.t().contiguous())
    optimizer = AdamW([ours], **SETTINGS)
    reference = torch.optim.AdamW([theirs], **SETTINGS, foreach=False)
    for _ in range(3):
        grad = torch.randn(3, 4)
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours, theirs)


def test_skips_count_no_step():
    (param,) = params = [torch.nn.Parameter(torch.ones(3))]
    optimizer = AdamW(params, **SETTINGS)
    for bad in (False, True, True, False):
        param.grad = torch.full((3,), torch.nan if bad else 0.5)
        verdict = plan_clipping(gradient_norm(params), 1.0)
        optimizer.step(clip=verdict)
    clean = [torch.nn.Parameter(torch.ones(3))]
    again = AdamW(clean, **SETTINGS)
    for _ in range(2):
        clean[0].grad = torch.full((3,), 0.5)
        again.step()
    assert optimizer.state[param]["step"].item() == 2.0
    torch.testing.assert_close(param, clean[0])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["adam", "adam_bf16", "sgd"])
def test_a_gpu_step_waits_for_nothing_and_copies_nothing(kind):
    generator = torch.Generator(device="cuda").manual_seed(0)
    shapes = [(4096, 4096)] * 8 + [(4096,)] * 50 + [(0,), ()]
    params = [torch.nn.Parameter(torch.zeros(s, device="cuda")) for s in shapes]
    optimizer = build_optimizer(
        [(str(i), p) for i, p in enumerate(params)], OptimizerConfig(type=kind)
    )
    for bad in (False, False, True):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator, device="cuda")
        if bad:
            params[3].grad[0, 0] = torch.inf
            before = [p.detach().clone() for p in params]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            verdict = plan_clipping(gradient_norm(params), 0.5)
            optimizer.step(clip=verdict)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        grown = torch.cuda.memory_allocated() - start
        extra = torch.cuda.max_memory_allocated() - start - grown
        assert extra < (200 << 20 if kind == "adam_bf16" else 1 << 20)  # all shards: 512 MiB
    assert verdict.found_inf.item() == 1.0
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))


@pytest.mark.gpu
def test_equals_torchs_plain_loop_on_a_gpu():
    ours = [torch.nn.Parameter(p.detach().cuda()) for p in make_params()]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    optimizer = AdamW(ours, **SETTINGS)
    reference = torch.optim.AdamW(theirs, **SETTINGS, foreach=False)
    for _ in range(10):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        optimizer.step(clip=plan_clipping(gradient_norm(ours), 0.5))
        torch.nn.utils.clip_grad_norm_(theirs, 0.5, foreach=False)
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


class HostReads(TorchDispatchMode):
    """Counts the operators by which a host learns a tensor's value."""

    NAMES = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::item")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name().startswith(self.NAMES)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["adam", "adam_bf16", "sgd"])
def test_the_host_reads_nothing_in_a_step(kind):
    params = make_params()
    optimizer = build_optimizer(
        [(str(i), p) for i, p in enumerate(params)], OptimizerConfig(type=kind)
    )
    give_gradients(params, torch.Generator().manual_seed(1))
    with HostReads() as reads:
        verdict = plan_clipping(gradient_norm(params), 0.5)
        optimizer.step(clip=verdict)
        assert reads.count == 0
        verdict.norm.item()
    assert reads.count == 1
