"""Fused and gathered log-probabilities against whole logits in float64."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpbench.engine.ops.logprobs import (
    fused_logprobs,
    gather_logprobs,
    gather_logprobs_entropy,
)
from tests.distributed.pool import run_on_ranks

TOKENS, HIDDEN, VOCAB = 41, 24, 700
PAYLOADS = "tests.distributed.payloads.ops_logprobs"


def make_inputs(dtype=torch.float32, tokens=TOKENS, hidden=HIDDEN, vocab=VOCAB, seed=0):
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(tokens, hidden, generator=generator).to(dtype)
    weight = (torch.randn(vocab, hidden, generator=generator) * 0.5).to(dtype)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[::7] = -100
    return states.requires_grad_(), weight.requires_grad_(), labels


def reference(hidden, weight, labels, temperature=1.0, softcap=None):
    """Whole logits in float64 -> (logprobs, entropy), differentiable."""
    logits = hidden.double() @ weight.double().t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_probs = (logits / temperature).log_softmax(-1)
    kept = labels != -100
    picked = log_probs.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return picked * kept, entropy * kept


def weighted_sum(values, seed=5):
    """A scalar in which each token of each output has its own weight."""
    generator = torch.Generator().manual_seed(seed)
    return sum(
        (value * torch.randn(value.shape, generator=generator).to(value.dtype)).sum()
        for value in values
        if value is not None
    )


def relative_error(value, expected):
    return ((value.double() - expected.double()).norm() / expected.double().norm()).item()


CASES = {
    "plain": {},
    "entropy": {"with_entropy": True},
    "temperature": {"temperature": 0.6, "with_entropy": True},
    "softcap": {"logit_softcap": 3.0},
    "softcap, temperature, entropy": {
        "logit_softcap": 3.0,
        "temperature": 1.7,
        "with_entropy": True,
    },
}


@pytest.mark.parametrize("chunk_size", [1, 16, 1024])
@pytest.mark.parametrize("case", CASES)
def test_fused_equals_whole_logits_to_1e_6(case, chunk_size):
    options = CASES[case]
    hidden, weight, labels = make_inputs()
    values = fused_logprobs(hidden, weight, labels, chunk_size=chunk_size, **options)
    expected = reference(
        hidden, weight, labels, options.get("temperature", 1.0), options.get("logit_softcap")
    )
    if not options.get("with_entropy"):
        assert values[1] is None
        expected = expected[:1]
    gradients = torch.autograd.grad(weighted_sum(values), [hidden, weight])
    expected_gradients = torch.autograd.grad(weighted_sum(expected), [hidden, weight])
    for value, wanted in zip(values, expected, strict=False):
        assert value.dtype == torch.float32
        assert relative_error(value, wanted) < 1e-6
    for value, wanted in zip(gradients, expected_gradients, strict=True):
        assert relative_error(value, wanted) < 1e-6


@pytest.mark.parametrize("case", CASES)
def test_float64_gradients_pass_gradcheck(case):
    hidden, weight, labels = make_inputs(torch.float64, tokens=5, hidden=3, vocab=600)

    def run(hidden, weight_rows):
        whole = torch.cat([weight_rows, weight.detach()[4:]])
        values = fused_logprobs(hidden, whole, labels, chunk_size=2, **CASES[case])
        return [value for value in values if value is not None]

    torch.autograd.gradcheck(run, (hidden, weight.detach()[:4].clone().requires_grad_()))


@pytest.mark.parametrize("output", [0, 1])
def test_gradient_through_one_output_alone(output):
    hidden, weight, labels = make_inputs()
    values = fused_logprobs(hidden, weight, labels, chunk_size=16, with_entropy=True)
    expected = reference(hidden, weight, labels)
    gradients = torch.autograd.grad(values[output].sum(), [hidden, weight])
    wanted = torch.autograd.grad(expected[output].sum(), [hidden, weight])
    for value, other in zip(gradients, wanted, strict=True):
        assert relative_error(value, other) < 1e-6


def test_large_logits_stay_finite():
    hidden, weight, labels = make_inputs()
    scaled = (hidden.detach() * 1e4).requires_grad_()
    values = fused_logprobs(scaled, weight, labels, chunk_size=16, with_entropy=True)
    expected = reference(scaled, weight, labels)
    assert relative_error(values[0], expected[0]) < 1e-6
    for gradient in torch.autograd.grad(weighted_sum(values), [scaled, weight]):
        assert gradient.isfinite().all()


def test_ignored_tokens_give_exact_zeros():
    hidden, weight, labels = make_inputs()
    values = fused_logprobs(hidden, weight, labels, with_entropy=True)
    ignored = labels == -100
    grad_hidden, _ = torch.autograd.grad(weighted_sum(values), [hidden, weight])
    for value in (*values, grad_hidden):
        assert not value[ignored].any()
        assert value[~ignored].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dummy_gives_zero_gradients(dtype):
    hidden, weight, labels = make_inputs(dtype)
    values = fused_logprobs(hidden, weight, torch.full_like(labels, -100), with_entropy=True)
    for value in (*values, *torch.autograd.grad(weighted_sum(values), [hidden, weight])):
        assert torch.equal(value, torch.zeros_like(value))


def unfused_bf16(hidden, weight, labels):
    log_probs = (hidden @ weight.t()).float().log_softmax(-1)
    kept = labels != -100
    return log_probs.gather(1, labels.clamp(min=0)[:, None])[:, 0] * kept


def test_bf16_is_closer_to_the_truth_than_the_unfused_path():
    """Logits are not rounded to bf16 and the weight's gradient is rounded once."""
    hidden, weight, labels = make_inputs(torch.bfloat16, tokens=512, hidden=64, vocab=2000)
    fused, _ = fused_logprobs(hidden, weight, labels, chunk_size=32)
    plain = unfused_bf16(hidden, weight, labels)
    expected, _ = reference(hidden, weight, labels)
    assert relative_error(fused, expected) < 1e-6
    assert relative_error(plain, expected) > 1e-4
    inputs = [hidden, weight]
    wanted = torch.autograd.grad(weighted_sum([expected]), inputs)
    ours = torch.autograd.grad(weighted_sum([fused]), inputs)
    theirs = torch.autograd.grad(weighted_sum([plain]), inputs)
    for mine, other, truth in zip(ours, theirs, wanted, strict=True):
        assert mine.dtype == torch.bfloat16
        assert relative_error(mine, truth) <= relative_error(other, truth) < 1e-2


def test_chunks_do_not_cost_accuracy_in_bf16():
    hidden, weight, labels = make_inputs(torch.bfloat16, tokens=512, hidden=64, vocab=2000)
    expected, _ = reference(hidden, weight, labels)
    wanted = torch.autograd.grad(weighted_sum([expected]), [hidden, weight])
    errors = []
    for chunk_size in (512, 1):
        fused, _ = fused_logprobs(hidden, weight, labels, chunk_size=chunk_size)
        ours = torch.autograd.grad(weighted_sum([fused]), [hidden, weight])
        errors.append([relative_error(a, b) for a, b in zip(ours, wanted, strict=True)])
    for whole, cut in zip(*errors, strict=True):
        assert cut < 1.02 * whole


class LargestTensor(TorchDispatchMode):
    """Records the largest result of any operator in a floating type, and counts products."""

    def __init__(self):
        super().__init__()
        self.numel = 0
        self.num_products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        self.num_products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        for result in results if isinstance(results, tuple | list) else [results]:
            if isinstance(result, torch.Tensor) and result.is_floating_point():
                self.numel = max(self.numel, result.numel())
        return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_whole_logits_never_exist(dtype, softcap):
    tokens, vocab, chunk = 256, 8192, 16
    hidden, weight, labels = make_inputs(dtype, tokens=tokens, hidden=4, vocab=vocab)
    with LargestTensor() as largest:
        values = fused_logprobs(
            hidden, weight, labels, chunk_size=chunk, with_entropy=True, logit_softcap=softcap
        )
        torch.autograd.grad(weighted_sum(values), [hidden, weight])
    assert largest.numel <= chunk * vocab
    with LargestTensor() as largest:
        unfused_bf16(hidden, weight, labels)
    assert largest.numel == tokens * vocab


@pytest.mark.parametrize(("frozen", "products"), [("hidden", 2), ("weight", 2), ("none", 3)])
def test_unneeded_gradients_are_not_computed(frozen, products):
    hidden, weight, labels = make_inputs(tokens=8)
    hidden.requires_grad_(frozen != "hidden")
    weight.requires_grad_(frozen != "weight")
    logprobs, _ = fused_logprobs(hidden, weight, labels)
    with LargestTensor() as counter:
        logprobs.sum().backward()
    assert counter.num_products == products
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")


def test_no_gradient_without_grad_mode():
    hidden, weight, labels = make_inputs()
    with torch.no_grad():
        logprobs, _ = fused_logprobs(hidden, weight, labels)
    assert not logprobs.requires_grad


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_without_values(device, dtype):
    """On fake and on meta tensors alike: no decision hangs on data, and no tile is too large."""
    tokens, vocab, chunk = 256, 8192, 16
    mode = FakeTensorMode() if device == "cpu" else contextlib.nullcontext()
    with mode, LargestTensor() as largest:
        hidden = torch.empty(tokens, 4, dtype=dtype, device=device, requires_grad=True)
        weight = torch.empty(vocab, 4, dtype=dtype, device=device, requires_grad=True)
        labels = torch.empty(tokens, dtype=torch.long, device=device)
        logprobs, entropy = fused_logprobs(
            hidden, weight, labels, chunk_size=chunk, with_entropy=True, logit_softcap=3.0
        )
        (logprobs.sum() + entropy.sum()).backward()
        assert (hidden.grad.shape, weight.grad.dtype) == (hidden.shape, dtype)
        assert largest.numel <= chunk * vocab
        logits = torch.empty(tokens, vocab, dtype=dtype, device=device, requires_grad=True)
        gather_logprobs(logits, labels, chunk_size=chunk).sum().backward()
        assert logits.grad.shape == logits.shape


@pytest.mark.parametrize("chunk_size", [1, 16, 1024])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gathered_equals_whole_logits(chunk_size, temperature):
    hidden, weight, labels = make_inputs()
    logits = (hidden.detach() @ weight.detach().t()).requires_grad_()
    before = logits.detach().clone()
    leaf = logits.detach().double().requires_grad_()
    eye = torch.eye(VOCAB, dtype=torch.float64)
    expected = reference(leaf, eye, labels, temperature)
    values = gather_logprobs_entropy(logits, labels, temperature, chunk_size=chunk_size)
    only = gather_logprobs(logits, labels, temperature, chunk_size=chunk_size)
    assert torch.equal(only, values[0])
    for value, wanted in zip(values, expected, strict=True):
        assert relative_error(value, wanted) < 1e-6
    (gradient,) = torch.autograd.grad(weighted_sum(values), logits)
    (wanted,) = torch.autograd.grad(weighted_sum(expected), leaf)
    assert relative_error(gradient, wanted) < 1e-6
    assert torch.equal(logits, before)


def test_gathered_keeps_batch_dimensions_and_the_logits_type():
    logits = torch.randn(2, 5, 30, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, 30, (2, 5))
    logprobs, entropy = gather_logprobs_entropy(logits, labels)
    assert logprobs.shape == entropy.shape == (2, 5)
    assert logprobs.dtype == torch.float32
    logprobs.sum().backward()
    assert logits.grad.dtype == torch.bfloat16
    assert logits.grad.shape == logits.shape


def test_uniform_logits_have_known_values():
    logprobs, entropy = gather_logprobs_entropy(torch.zeros(3, 8), torch.tensor([0, 7, -100]))
    assert logprobs.tolist() == pytest.approx([-math.log(8), -math.log(8), 0.0])
    assert entropy.tolist() == pytest.approx([math.log(8), math.log(8), 0.0])


@pytest.mark.parametrize("world_size", [2, 4])
def test_sharded_vocabulary_equals_whole_logits(world_size):
    """Values equal on all ranks; gradients of hidden add up over ranks, the weight's are shards."""
    results = run_on_ranks(f"{PAYLOADS}:compare_shards", world_size, cases=CASES)
    for rank, errors in enumerate(results):
        assert set(errors) == set(CASES) | {"gathered"}
        for case, found in errors.items():
            for name, error in found.items():
                assert error < 1e-6, f"rank {rank}, {case}, {name}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one GPU")
def test_bf16_on_a_gpu_is_exact_and_lean():
    tokens, hidden_size, vocab, chunk = 2048, 256, 32768, 128
    hidden, weight, labels = (
        tensor.detach().cuda() for tensor in make_inputs(torch.bfloat16, tokens, hidden_size, vocab)
    )
    hidden.requires_grad_()
    weight.requires_grad_()
    factor = torch.randn(tokens, device="cuda")

    def run():
        values = fused_logprobs(hidden, weight, labels, chunk_size=chunk, with_entropy=True)
        loss = (values[0] * factor + values[1]).sum()
        return (*values, *torch.autograd.grad(loss, [hidden, weight]))

    run()  # cuBLAS takes its workspace
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = run()
    tile_bytes, num_tiles = 4 * chunk * vocab, 3  # logits, probabilities, the rounded gradient
    other_bytes = 2 * weight.numel() + 10 * hidden.numel() + 64 * tokens
    assert torch.cuda.max_memory_allocated() - before < num_tiles * tile_bytes + other_bytes
    expected = reference(hidden, weight, labels)
    loss = (expected[0] * factor + expected[1]).sum()
    wanted = (*expected, *torch.autograd.grad(loss, [hidden, weight]))
    for result, truth, limit in zip(results, wanted, [1e-6, 1e-6, 4e-3, 4e-3], strict=True):
        assert relative_error(result, truth) < limit
