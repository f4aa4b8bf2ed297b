"""Sharded steps against whole ones; skipped steps; states that checkpoints can carry."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdpbench.engine.config.optimizer import OptimizerConfig
from fsdpbench.engine.optim.adamw import AdamW
from fsdpbench.engine.optim.anyprecision import AnyPrecisionAdamW
from fsdpbench.engine.optim.build import build_optimizer
from fsdpbench.engine.optim.clip import gradient_norm, plan_clipping
from fsdpbench.engine.optim.sgd import SGD
from tests.distributed.pool import run_on_ranks

PAYLOADS = "tests.distributed.payloads.optim_sharded"
KINDS = ["adam", "adam_bf16", "sgd"]


@pytest.mark.parametrize("layout", ["fsdp", "fsdp_tp"])
@pytest.mark.parametrize(
    # bf16 moments turn a last digit of the gradient into 0.4 % of a step of 0.05
    ("kind", "tolerance"),
    [("adam", 2e-6), ("sgd", 1e-7), ("adam_bf16", 5e-4)],
)
def test_sharded_steps_equal_whole_ones(kind, tolerance, layout):
    results = run_on_ranks(f"{PAYLOADS}:train_both", 4, kind=kind, layout=layout)
    for weights, norms in results:
        assert weights < tolerance
        assert norms < (1e-2 if kind == "adam_bf16" else 2e-6)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("offload", [False, True], ids=["on_gpu", "offloaded"])
@pytest.mark.parametrize("layout", ["fsdp", "fsdp_tp"])
@pytest.mark.parametrize(
    ("kind", "tolerance"), [("adam", 2e-5), ("sgd", 1e-6), ("adam_bf16", 5e-4)]
)
def test_sharded_steps_equal_whole_ones_on_gpus(kind, tolerance, layout, offload):
    results = run_on_ranks(
        f"{PAYLOADS}:train_both",
        2,
        kind=kind,
        layout=layout,
        offload=offload,
        device="cuda",
        device_type="cuda",
    )
    for weights, norms in results:
        assert weights < tolerance
        assert norms < (1e-2 if kind == "adam_bf16" else 1e-5)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_gradient_skips_the_step_on_gpus(kind):
    results = run_on_ranks(
        f"{PAYLOADS}:skip_a_step",
        2,
        kind=kind,
        poison=float("nan"),
        device="cuda",
        device_type="cuda",
    )
    assert results == [(True, False, 1.0)] * 2


@pytest.mark.multi_gpu
@pytest.mark.parametrize("kind", ["adam", "adam_bf16"])
def test_states_survive_a_checkpoint_on_gpus(kind, tmp_path):
    results = run_on_ranks(
        f"{PAYLOADS}:resume_from_checkpoint",
        2,
        kind=kind,
        dtype="float32",
        folder=str(tmp_path),
        device="cuda",
        device_type="cuda",
    )
    assert all(seen["same_states"] and seen["same_end"] for seen in results)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(kind, poison):
    results = run_on_ranks(f"{PAYLOADS}:skip_a_step", 2, kind=kind, poison=poison)
    assert results == [(True, False, 1.0)] * 2


@pytest.mark.parametrize(
    ("kind", "dtype", "dtypes"),
    [
        ("adam", "float32", {"exp_avg": "float32", "exp_avg_sq": "float32"}),
        ("adam_bf16", "float32", {"exp_avg": "bfloat16", "exp_avg_sq": "bfloat16"}),
        (
            "adam_bf16",
            "bfloat16",
            {"exp_avg": "bfloat16", "exp_avg_sq": "bfloat16", "compensation": "bfloat16"},
        ),
        ("sgd", "float32", {}),
    ],
)
def test_states_survive_a_checkpoint(kind, dtype, dtypes, tmp_path):
    results = run_on_ranks(
        f"{PAYLOADS}:resume_from_checkpoint", 2, kind=kind, dtype=dtype, folder=str(tmp_path)
    )
    for seen in results:
        expected = {
            f"{name}.{key}": (f"torch.{value}", True)
            for name in seen["names"]
            for key, value in dtypes.items()
        }
        if dtypes:
            expected |= {f"{name}.step": ("torch.float32", False) for name in seen["names"]}
        assert seen["states"] == expected
        assert seen["same_states"]
        assert seen["same_end"]
    if dtypes:
        assert results[0]["whole_shapes"]["up.weight"] == (10, 7)


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_is_a_torch_optimizer(kind):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = build_optimizer([("w", param)], OptimizerConfig(type=kind))

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert param.max().item() < 1.0
    optimizer.zero_grad()
    assert param.grad is None
    optimizer.step()  # no gradients: nothing to do


@pytest.mark.parametrize("kind", [AdamW, AnyPrecisionAdamW])
def test_a_loaded_state_keeps_its_own_dtype_and_its_values(kind):
    param = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    wide = {"variance_dtype": torch.float32} if kind is AnyPrecisionAdamW else {}
    optimizer = kind([param], **wide)
    param.grad = torch.full_like(param, 0.3)
    optimizer.step()
    saved = optimizer.state_dict()
    other = kind([torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))], **wide)
    other.load_state_dict(saved)
    (loaded,) = other.state.values()
    for name, value in optimizer.state[param].items():
        assert loaded[name].dtype == value.dtype
        assert torch.equal(loaded[name], value)
        assert loaded[name].data_ptr() != value.data_ptr()


@pytest.mark.parametrize("make", [AdamW, AnyPrecisionAdamW, SGD])
def test_a_step_without_a_gradient_leaves_a_parameter_and_its_counter(make):
    used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = make([used, unused])
    used.grad = torch.ones(2)
    optimizer.step()
    assert unused not in optimizer.state
    assert torch.equal(unused, torch.ones(2))


class FreshBytes(TorchDispatchMode):
    """Adds up the bytes of storages that operators made."""

    def __init__(self):
        super().__init__()
        self.total, self.alive = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        known = {
            t.untyped_storage().data_ptr()
            for t in tree_leaves((args, kwargs, self.alive))
            if isinstance(t, torch.Tensor)
        }
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                if tensor.untyped_storage().data_ptr() not in known:
                    self.total += tensor.untyped_storage().nbytes()
                self.alive.append(tensor)
        return results


@pytest.mark.parametrize(("make", "states"), [(AdamW, 2), (SGD, 0)])
def test_the_first_step_makes_its_states_and_no_other_copy(make, states):
    params = [torch.nn.Parameter(torch.ones(1 << 14)) for _ in range(4)]
    for param in params:
        param.grad = torch.ones_like(param)
    with FreshBytes() as made:
        make(params).step(clip=plan_clipping(gradient_norm(params), 1.0))
    assert made.total - states * 4 * params[0].nbytes < 4096


@pytest.mark.gpu
@pytest.mark.parametrize(("make", "states"), [(AdamW, 2), (SGD, 0)])
def test_the_first_steps_peak_is_the_steady_state_on_a_gpu(make, states):
    params = [torch.nn.Parameter(torch.ones(1 << 20, device="cuda")) for _ in range(8)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = make(params)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step(clip=plan_clipping(gradient_norm(params), 1.0))
    steady = torch.cuda.memory_allocated()
    assert steady - before >= states * 8 * params[0].nbytes
    assert torch.cuda.max_memory_allocated() - steady < params[0].nbytes  # a block has several
