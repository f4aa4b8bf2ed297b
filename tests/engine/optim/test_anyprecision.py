"""AnyPrecisionAdamW against a loop over elements, and what Kahan summation is worth."""

from __future__ import annotations

import math

import pytest
import torch

from fsdpbench.engine.optim.adamw import AdamW
from fsdpbench.engine.optim.anyprecision import AnyPrecisionAdamW

LR, BETA1, BETA2, EPS, DECAY = 0.01, 0.9, 0.99, 1e-8, 0.1
SETTINGS = {"lr": LR, "betas": (BETA1, BETA2), "eps": EPS, "weight_decay": DECAY}


def round_to(dtype, value):
    return torch.tensor(value, dtype=torch.float64).to(dtype).item()


def loop(weights, gradients, dtype, kahan):
    """Follow each element alone in double precision; round only what is stored."""
    finals = []
    for index, weight in enumerate(weights):
        p, m, v, c = weight, 0.0, 0.0, 0.0
        for t, gradient in enumerate(gradients, start=1):
            g = gradient[index]
            m_new = BETA1 * m + (1 - BETA1) * g
            v_new = BETA2 * v + (1 - BETA2) * g * g
            m_hat, v_hat = m_new / (1 - BETA1**t), v_new / (1 - BETA2**t)
            u = -LR * DECAY * p - LR * m_hat / (math.sqrt(v_hat) + EPS) + (c if kahan else 0.0)
            p_new = round_to(dtype, p + u)
            c = round_to(torch.bfloat16, u - (p_new - p))
            p, m, v = p_new, round_to(torch.bfloat16, m_new), round_to(torch.bfloat16, v_new)
        finals.append((p, m, v, c))
    return torch.tensor(finals, dtype=torch.float64).unbind(1)


def run(weights, gradients, dtype, kahan, splits=(40,), **settings):
    params = [
        torch.nn.Parameter(piece.to(dtype))
        for piece in torch.tensor(weights, dtype=torch.float64).split(list(splits))
    ]
    optimizer = AnyPrecisionAdamW(params, use_kahan_summation=kahan, **SETTINGS, **settings)
    for gradient in gradients:
        pieces = torch.tensor(gradient, dtype=torch.float64).split(list(splits))
        for param, piece in zip(params, pieces, strict=True):
            param.grad = piece.to(dtype)
        optimizer.step()
    names = [name for name in optimizer.state[params[0]] if name != "step"]
    states = [torch.cat([optimizer.state[p][name].double() for p in params]) for name in names]
    return torch.cat([p.detach().double() for p in params]), dict(zip(names, states, strict=True))


def make_data(dtype, steps=6):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(steps + 1, 40, generator=generator).to(dtype).double()
    return values[0].tolist(), values[1:].tolist()


@pytest.mark.parametrize("kahan", [True, False])
def test_bf16_equals_the_loop_to_the_last_bit_of_almost_all(kahan):
    weights, gradients = make_data(torch.bfloat16)
    param, states = run(weights, gradients, torch.bfloat16, kahan)
    p, m, v, c = loop(weights, gradients, torch.bfloat16, kahan)
    assert ("compensation" in states) == kahan
    wanted = {"exp_avg": m, "exp_avg_sq": v} | ({"compensation": c} if kahan else {})
    for ours, theirs in [(param, p), *((states[name], wanted[name]) for name in wanted)]:
        # float32 against double: a value next to a tie may round the other way
        assert (ours == theirs).float().mean() >= 0.95
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-4)


def test_fp32_weights_with_bf16_moments_equal_the_loop():
    weights, gradients = make_data(torch.float32)
    param, states = run(weights, gradients, torch.float32, kahan=True)
    p, m, _, _ = loop(weights, gradients, torch.float32, kahan=False)
    assert sorted(states) == ["exp_avg", "exp_avg_sq"]
    torch.testing.assert_close(param, p, rtol=1e-4, atol=1e-5)
    assert (states["exp_avg"] == m).float().mean() >= 0.95


def test_wide_moments_give_adamw():
    weights, gradients = make_data(torch.float32)
    wide = {"momentum_dtype": torch.float32, "variance_dtype": torch.float32}
    param, _ = run(weights, gradients, torch.float32, kahan=True, **wide)
    plain = torch.nn.Parameter(torch.tensor(weights))
    optimizer = AdamW([plain], **SETTINGS)
    for gradient in gradients:
        plain.grad = torch.tensor(gradient)
        optimizer.step()
    torch.testing.assert_close(param.float(), plain.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("chunk_elements", [1, 7, 16, 1000])
@pytest.mark.parametrize("splits", [(40,), (1, 2, 0, 30, 7)])
def test_chunks_change_nothing(chunk_elements, splits):
    weights, gradients = make_data(torch.bfloat16)
    expected, _ = run(weights, gradients, torch.bfloat16, kahan=True)
    found, _ = run(weights, gradients, torch.bfloat16, True, splits, chunk_elements=chunk_elements)
    torch.testing.assert_close(found, expected, rtol=0, atol=2**-8)
    assert (found == expected).float().mean() >= 0.95


def test_parameters_in_one_chunk_keep_their_own_step_counts():
    early, late = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    alone = torch.nn.Parameter(torch.ones(3))
    optimizer, reference = AnyPrecisionAdamW([early, late]), AnyPrecisionAdamW([alone])
    for number in range(5):
        early.grad = torch.full((3,), 0.1 + number)
        if number >= 3:
            late.grad, alone.grad = torch.full((3,), 0.3), torch.full((3,), 0.3)
            reference.step()
        optimizer.step()
    assert torch.equal(late, alone)
    assert optimizer.state[early]["step"].item() == 5.0


def test_tiny_updates_survive_with_kahan_summation_and_vanish_without():
    steps, lr = 300, 1e-5  # one update is 1/390 of the spacing of bf16 below 1
    finals = {}
    for name, dtype, kahan in [
        ("exact", torch.float64, False),
        ("kahan", torch.bfloat16, True),
        ("naive", torch.bfloat16, False),
    ]:
        param = torch.nn.Parameter(torch.ones(8, dtype=dtype))
        optimizer = AnyPrecisionAdamW([param], lr=lr, weight_decay=0.1, use_kahan_summation=kahan)
        for _ in range(steps):
            param.grad = torch.full_like(param, 0.5)
            optimizer.step()
        finals[name] = param.detach().double().mean().item()
    assert finals["naive"] == 1.0
    assert abs(finals["kahan"] - finals["exact"]) < 2**-9 + 1e-4  # half a spacing
    assert 1 - finals["exact"] > 3e-3


@pytest.mark.parametrize("beta", [(0.0, 0.9), (0.9, 0.0), (0.0, 0.0)])
def test_zero_betas(beta):
    ours, theirs = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))
    wide = {"momentum_dtype": torch.float32, "variance_dtype": torch.float32}
    optimizer = AnyPrecisionAdamW([ours], betas=beta, **wide)
    reference = torch.optim.AdamW([theirs], betas=beta, foreach=False)
    for _ in range(3):
        ours.grad = torch.randn(4)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours, theirs)


def make_student(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))


def train_student(make_optimizer, dtype, steps=400):
    """Fit a noisy teacher; return the last loss of the stored weights, computed in float32."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 16, generator=generator)
    targets = make_student(3)(inputs).detach() + 0.1 * torch.randn(512, 4, generator=generator)
    student = make_student(1).to(torch.bfloat16).to(dtype)
    optimizer = make_optimizer(student.parameters(), lr=2e-4, weight_decay=0.0)

    def loss_on(rows):
        weights = {name: param.float() for name, param in student.named_parameters()}
        outputs = torch.func.functional_call(student, weights, (inputs[rows],))
        return (outputs - targets[rows]).square().mean()

    for _ in range(steps):
        optimizer.zero_grad()
        loss_on(torch.randint(512, (64,), generator=generator)).backward()
        optimizer.step()
    return loss_on(slice(None)).item()


def test_bf16_training_reaches_the_loss_of_fp32_adamw_where_plain_bf16_fails():
    expected = train_student(AdamW, torch.float32)
    assert train_student(AnyPrecisionAdamW, torch.bfloat16) == pytest.approx(expected, rel=0.01)
    assert train_student(AdamW, torch.bfloat16) > 2 * expected


def test_rounding_is_forgotten_and_nothing_else():
    params = [torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = AnyPrecisionAdamW(params, lr=1e-4)
    params[0].grad = torch.full_like(params[0], 0.5)
    optimizer.step()
    state = optimizer.state[params[0]]
    moments = [state[name].clone() for name in ("exp_avg", "exp_avg_sq", "step")]
    assert state["compensation"].any()
    optimizer.forget_rounding()
    assert not state["compensation"].any()
    for name, moment in zip(("exp_avg", "exp_avg_sq", "step"), moments, strict=True):
        assert torch.equal(state[name], moment)
    AdamW(params).forget_rounding()  # has none
