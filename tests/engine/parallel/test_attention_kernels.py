"""Every kernel against a loop over tokens in fp64: causality, isolation, windows, shared heads."""

from __future__ import annotations

import math

import pytest
import torch

from fsdpbench.engine.parallel.attention_kernels import (
    PackedLayout,
    cpu_flash,
    eager,
    load_varlen_attn,
    sdpa,
    wrap_flash_package,
)

LENGTHS = (5, 1, 9)


def attend_token_by_token(query, key, value, layout):
    """query [T, H, D] in fp64; every score is computed alone."""
    output = torch.zeros_like(query)
    groups = query.shape[1] // key.shape[1]
    start = 0
    for length in layout.sequence_lengths:
        for t in range(start, start + length):
            window = layout.sliding_window or length
            seen = range(max(start, t - window + 1), t + 1)
            for head in range(query.shape[1]):
                scores = [
                    math.exp(float(query[t, head] @ key[s, head // groups]) * layout.scaling)
                    for s in seen
                ]
                for s, score in zip(seen, scores, strict=True):
                    output[t, head] += score / sum(scores) * value[s, head // groups]
        start += length
    return output


def make_layout(sliding_window=None, scaling=0.4):
    bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    return PackedLayout(bounds, LENGTHS, scaling, sliding_window)


def draw(heads, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(LENGTHS), heads, 8, generator=generator, dtype=torch.float64)
    return x.to(dtype)


@pytest.mark.parametrize("window", [None, 1, 3, 20])
@pytest.mark.parametrize("kernel", [cpu_flash, sdpa, eager])
def test_equals_a_loop_over_tokens(kernel, window):
    query, key, value = draw(4), draw(2, seed=1), draw(2, seed=2)
    layout = make_layout(window)
    wanted = attend_token_by_token(query.double(), key.double(), value.double(), layout)
    assert (kernel(query, key, value, layout) - wanted).abs().max() < 1e-6


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kernel", [cpu_flash, sdpa])
def test_gradients_equal_those_of_eager(kernel, window):
    layout = make_layout(window)
    weight = draw(4, seed=5)

    def differentiate(run):
        inputs = [draw(4), draw(2, seed=1), draw(2, seed=2)]
        inputs = [x.requires_grad_() for x in inputs]
        (run(*inputs, layout) * weight).sum().backward()
        return [x.grad for x in inputs]

    for found, wanted in zip(differentiate(kernel), differentiate(eager), strict=True):
        assert (found - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("kernel", [cpu_flash, sdpa, eager])
def test_a_sequence_does_not_see_its_neighbours(kernel):
    query, key, value = draw(2), draw(2, seed=1), draw(2, seed=2)
    before = kernel(query, key, value, make_layout())
    key[: LENGTHS[0]] += 100.0
    value[-LENGTHS[2] :] -= 100.0
    after = kernel(query, key, value, make_layout())
    middle = slice(LENGTHS[0], LENGTHS[0] + LENGTHS[1])
    assert torch.equal(before[middle], after[middle])
    assert not torch.equal(before[: LENGTHS[0]], after[: LENGTHS[0]])


def test_dropout_reaches_the_kernels_that_have_it():
    query = draw(2)
    layout = make_layout()
    dropped = PackedLayout(layout.cu_seqlens, LENGTHS, layout.scaling, None, dropout=0.9)
    for kernel in (sdpa, eager):
        assert not torch.equal(
            kernel(query, query, query, layout), kernel(query, query, query, dropped)
        )


def test_layout_says_bounds_as_flash_kernels_want_them():
    assert make_layout().window == (-1, 0)
    assert make_layout(sliding_window=4).window == (3, 0)
    assert make_layout().max_seqlen == 9


@pytest.mark.parametrize(
    ("name", "window", "written"),
    [
        ("flash_attn", None, (-1, -1)),
        ("flash_attn", 4, (3, 0)),
        ("flash_attn_4", None, (None, None)),
        ("flash_attn_4", 4, (3, 0)),
    ],
)
def test_flash_packages_get_their_own_spelling(name, window, written):
    """The packages do not run here; what they are called with is compared with their signature."""
    seen = {}

    def flash_attn_varlen_func(q, k, v, **arguments):
        seen.update(arguments)
        return (q, None) if name == "flash_attn_4" else q

    layout = make_layout(window)
    kernel = wrap_flash_package(name, flash_attn_varlen_func)
    query = draw(2)
    assert kernel.run(query, query, query, layout) is query
    assert kernel.name == name
    assert seen == {
        "cu_seqlens_q": layout.cu_seqlens,
        "cu_seqlens_k": layout.cu_seqlens,
        "max_seqlen_q": 9,
        "max_seqlen_k": 9,
        "softmax_scale": 0.4,
        "causal": True,
        "window_size": written,
    }


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 3])
def test_varlen_attn_equals_eager_on_a_gpu(window):
    bounds = make_layout().cu_seqlens.cuda()
    layout = PackedLayout(bounds, LENGTHS, 0.4, window)
    query, key, value = (
        draw(heads, torch.bfloat16, seed).cuda() for heads, seed in ((4, 0), (2, 1), (2, 2))
    )
    wanted = eager(query.float(), key.float(), value.float(), layout)
    found = load_varlen_attn().run(query, key, value, layout)
    assert (found.float() - wanted).abs().max() < 3e-2
