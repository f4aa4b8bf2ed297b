"""What norm and step cost over many shards. Numbers for the lab book; no test depends on them.

On a GPU: the shards of 0.6e9 parameters in 310 tensors; on the CPU a hundredth of that.
"""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from fsdpbench.engine.config.optimizer import OptimizerConfig
from fsdpbench.engine.device import Device
from fsdpbench.engine.optim.build import build_optimizer
from fsdpbench.engine.optim.clip import gradient_norm, plan_clipping

DEVICE = Device("cuda" if torch.cuda.is_available() else "cpu")
ELEMENTS = 6 * 10**8 if DEVICE.is_asynchronous else 6 * 10**6


def make_params(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Build shards with gradients."""
    big, small = ELEMENTS // 200, 1024
    sizes = [big] * 200 + [small] * 110
    params = [
        torch.nn.Parameter(torch.zeros(size, dtype=dtype, device=DEVICE.torch_device))
        for size in sizes
    ]
    for param in params:
        param.grad = torch.full_like(param, 1e-3)
    return params


@pytest.mark.parametrize("kind", ["adam", "adam_bf16", "sgd", "torch_fused", "torch_foreach"])
def test_step(benchmark: BenchmarkFixture, kind: str) -> None:
    """Time norm, clipping and step, the device's work included."""
    params = make_params(torch.bfloat16 if kind == "adam_bf16" else torch.float32)
    if kind.startswith("torch"):
        optimizer = torch.optim.AdamW(params, **{kind.removeprefix("torch_"): True})

        def step() -> None:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            DEVICE.synchronize()
    else:
        named = [(str(index), param) for index, param in enumerate(params)]
        optimizer = build_optimizer(named, OptimizerConfig(type=kind))

        def step() -> None:
            optimizer.step(clip=plan_clipping(gradient_norm(params), 1.0))
            DEVICE.synchronize()

    benchmark.pedantic(step, rounds=10, warmup_rounds=2)
