"""Statistics merged over tiles against a softmax over the whole vocabulary, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from fsdpbench.engine.ops.vocab_softmax import (
    SoftmaxGradients,
    concatenate_tokens,
    locate_labels,
    measure_tile,
    merge_tiles,
    reduce_shards,
)

TOKENS, VOCAB = 11, 40
CUTS = [(0, 3), (3, 4), (4, 33), (33, 40)]


def make_logits(scale=3.0):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, VOCAB, generator=generator, dtype=torch.float64) * scale
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    return logits, labels


def measure(logits, labels, start, stop):
    return measure_tile(
        logits[:, start:stop].clone(), *locate_labels(labels, start, stop), with_entropy=True
    )


def test_labels_are_located_in_one_tile_only():
    columns, inside = locate_labels(torch.tensor([-100, 9, 10, 14, 15, 20]), 10, 15)
    assert inside.tolist() == [False, False, True, True, False, False]
    assert columns.tolist() == [0, 0, 0, 4, 4, 4]


def check_merged(logits, labels):
    merged = measure(logits, labels, *CUTS[2])
    for start, stop in (CUTS[3], CUTS[0], CUTS[1]):
        merged = merge_tiles(merged, measure(logits, labels, start, stop))
    log_probs = logits.log_softmax(-1)
    torch.testing.assert_close(merged.logsumexp, logits.logsumexp(-1))
    torch.testing.assert_close(merged.target, logits.gather(1, labels[:, None])[:, 0])
    torch.testing.assert_close(merged.entropy, -(log_probs.exp() * log_probs).sum(-1))


def test_tiles_merge_in_any_order():
    check_merged(*make_logits())


def test_large_logits_do_not_overflow():
    check_merged(*make_logits(scale=1e4))


def test_tokens_are_joined():
    logits, labels = make_logits()
    parts = [
        measure(logits[start:stop], labels[start:stop], 0, VOCAB)
        for start, stop in [(0, 4), (4, 11)]
    ]
    joined = concatenate_tokens(parts)
    whole = measure(logits, labels, 0, VOCAB)
    assert torch.equal(joined.logsumexp, whole.logsumexp)
    assert torch.equal(joined.entropy, whole.entropy)


def test_without_a_group_nothing_is_reduced():
    logits, labels = make_logits()
    statistics = measure(logits, labels, 0, VOCAB)
    assert reduce_shards(statistics, None) is statistics


def test_entropy_is_not_measured_unless_asked_for():
    logits, labels = make_logits()
    statistics = measure_tile(logits.clone(), *locate_labels(labels, 0, VOCAB), with_entropy=False)
    assert statistics.weighted is None
    assert statistics.entropy is None
    torch.testing.assert_close(statistics.logsumexp, logits.logsumexp(-1))


def test_tile_gradients_are_columns_of_the_whole_gradient():
    logits, labels = make_logits()
    generator = torch.Generator().manual_seed(1)
    grads = torch.randn(2, TOKENS, generator=generator, dtype=torch.float64)
    leaf = logits.clone().requires_grad_()
    log_probs = leaf.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    picked = log_probs.gather(1, labels[:, None])[:, 0]
    (expected,) = torch.autograd.grad((picked * grads[0] + entropy * grads[1]).sum(), leaf)
    gradients = SoftmaxGradients(
        logits.logsumexp(-1), picked.detach(), entropy.detach(), grads[0], grads[1]
    )
    for start, stop in CUTS:
        tile = gradients.differentiate_tile(
            logits[:, start:stop].clone(),
            *locate_labels(labels, start, stop),
            dtype=torch.float64,
        )
        torch.testing.assert_close(tile, expected[:, start:stop])
    some = gradients.select(2, 6)
    tile = some.differentiate_tile(
        logits[2:6].clone(), *locate_labels(labels[2:6], 0, VOCAB), dtype=torch.float64
    )
    torch.testing.assert_close(tile, expected[2:6])


def test_a_confident_label_keeps_a_gradient_after_rounding():
    """1 - p is far below what bf16 resolves beside 1, and the label's entry must still be exact."""
    logits = torch.zeros(1, 4)
    logits[0, 2] = 12.0
    labels = torch.tensor([2])
    statistics = measure(logits, labels, 0, 4)
    gradients = SoftmaxGradients(
        statistics.logsumexp, statistics.logprobs, None, torch.ones(1), None
    )
    tile = gradients.differentiate_tile(
        logits.clone(), *locate_labels(labels, 0, 4), dtype=torch.bfloat16
    )
    rest = 3 * math.exp(-12) / (1 + 3 * math.exp(-12))
    assert tile[0, 2].item() == pytest.approx(rest, rel=2**-8)
