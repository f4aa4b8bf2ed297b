"""The gradient norm under every placement, and what a verdict says."""

from __future__ import annotations

import math

import pytest
import torch

from fsdpbench.engine.optim.clip import fsdp2_clip_grad_norm, gradient_norm, plan_clipping
from fsdpbench.errors import ConfigError
from tests.distributed.pool import run_on_ranks

PAYLOADS = "tests.distributed.payloads.optim_sharded"


def make_params(*grads):
    params = []
    for grad in grads:
        param = torch.nn.Parameter(torch.zeros_like(grad))
        param.grad = grad
        params.append(param)
    return params


def test_norm_under_mixed_placements_is_the_full_tensors():
    results = run_on_ranks(f"{PAYLOADS}:norm_of_mixed_placements", 4)
    for norm, expected, returned, clipped in results:
        assert norm == pytest.approx(expected, rel=1e-6)
        assert returned == norm == results[0][0]
        assert clipped == pytest.approx(0.5 * expected, rel=1e-5)


@pytest.mark.multi_gpu
def test_norm_under_mixed_placements_on_gpus():
    results = run_on_ranks(
        f"{PAYLOADS}:norm_of_mixed_placements", 2, device="cuda", device_type="cuda"
    )
    for norm, expected, returned, clipped in results:
        assert norm == pytest.approx(expected, rel=1e-6)
        assert returned == norm == results[0][0]
        assert clipped == pytest.approx(0.5 * expected, rel=1e-5)


def test_the_mix_holds_the_strided_placement():
    assert "_StridedShard" in run_on_ranks(f"{PAYLOADS}:names_of_placements", 4)[0]


def test_norm_of_plain_tensors():
    params = make_params(
        torch.randn(7, 3), torch.randn(5, dtype=torch.bfloat16), torch.randn(4).double()
    )
    params.append(torch.nn.Parameter(torch.ones(2)))  # no gradient
    total = sum(p.grad.double().square().sum().item() for p in params[:-1])
    assert gradient_norm([*params, params[0]]).item() == pytest.approx(math.sqrt(total), rel=1e-6)


def test_norm_of_nothing_is_zero():
    assert gradient_norm([]).item() == 0.0
    assert gradient_norm([torch.nn.Parameter(torch.ones(2))]).item() == 0.0


@pytest.mark.parametrize("size", [0.3, 40.0])
def test_clipping_equals_torchs(size):
    ours = make_params(size * torch.randn(3, 4), size * torch.randn(9))
    theirs = make_params(*(p.grad.clone() for p in ours))
    norm = fsdp2_clip_grad_norm(iter(ours), 5.0)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 5.0)
    torch.testing.assert_close(norm, expected)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize(
    ("norm", "max_norm", "scale", "found"),
    [
        (0.5, 1.0, 1.0, 0.0),
        (4.0, 1.0, 0.25, 0.0),
        (0.0, 1.0, 1.0, 0.0),
        (4.0, None, None, 0.0),
        (math.inf, None, None, 1.0),
        (math.nan, 1.0, math.nan, 1.0),
        (-math.inf, 1.0, None, 1.0),
    ],
)
def test_verdict(norm, max_norm, scale, found):
    verdict = plan_clipping(torch.tensor(norm), max_norm)
    assert verdict.found_inf.item() == found
    assert verdict.found_inf.dtype == torch.float32
    if max_norm is None:
        assert verdict.scale is None
        assert verdict.grad_scale is None
    elif not found:
        assert verdict.scale.item() == pytest.approx(scale, rel=1e-6)
        assert verdict.grad_scale.item() == pytest.approx(1 / scale, rel=1e-6)


def test_an_unclipped_step_divides_by_exactly_one():
    assert plan_clipping(torch.tensor(0.3), 1.0).grad_scale.item() == 1.0


@pytest.mark.parametrize("size", [0.3, 40.0])
def test_clipping_by_the_inf_norm_equals_torchs(size):
    ours = make_params(size * torch.randn(3, 4), size * torch.randn(9))
    theirs = make_params(*(p.grad.clone() for p in ours))
    norm = fsdp2_clip_grad_norm(ours, 2.0, math.inf)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 2.0, norm_type=math.inf)
    torch.testing.assert_close(norm, expected)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_inf_norm_of_a_bad_gradient_skips_the_step(bad):
    params = make_params(torch.randn(70), torch.tensor([1.0, bad, 2.0]), torch.randn(3))
    norm = gradient_norm(params, math.inf)
    assert norm.item() == math.inf
    assert plan_clipping(norm, 1.0).found_inf.item() == 1.0


def test_inf_norm_under_mixed_placements_is_the_full_tensors():
    results = run_on_ranks(
        f"{PAYLOADS}:norm_of_mixed_placements", 4, timeout_seconds=60, norm_type=math.inf
    )
    for norm, expected, returned, clipped in results:
        assert norm == expected == returned == results[0][0]
        assert clipped == pytest.approx(0.5 * expected, rel=1e-5)


def test_ranks_without_gradients_take_part():
    (first, second) = run_on_ranks(f"{PAYLOADS}:norm_of_frozen_ranks", 2, timeout_seconds=60)
    assert first == second
    assert first[0] == pytest.approx(first[1], rel=1e-6)
    assert first[2] == first[3]


@pytest.mark.parametrize("norm_type", [1.0, 0, -1, math.nan])
def test_other_norms_are_refused(norm_type):
    with pytest.raises(ConfigError, match=r"norm_type=.*: must be 2\.0 or inf"):
        gradient_norm([], norm_type)


def test_norm_of_nothing_lies_on_the_computing_device():
    cpu = torch.device("cpu")
    assert gradient_norm([], 2.0, cpu).item() == 0.0
    assert gradient_norm([torch.nn.Parameter(torch.ones(2))], math.inf, cpu).item() == 0.0


@pytest.mark.gpu
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_host_gradients_are_summed_on_the_device(norm_type):
    device = torch.device("cuda", 0)
    params = make_params(
        torch.randn(1 << 20), torch.randn(7, 3).t(), torch.randn(33, dtype=torch.bfloat16)
    )
    expected = torch.cat([p.grad.double().reshape(-1) for p in params]).norm(norm_type)
    norm = gradient_norm(params, norm_type, device)
    assert norm.device == device
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    assert gradient_norm([], norm_type, device).device == device
