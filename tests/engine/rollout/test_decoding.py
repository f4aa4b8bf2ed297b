"""Batched generation against single sequences without a cache; draws, stops, interruptions."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from fsdpbench.engine.rollout.decoding import OpenSequence, choose_tokens, decode
from fsdpbench.engine.rollout.generation import GeneratedSequence, SamplingSettings
from fsdpbench.errors import ConfigError
from tests.engine.rollout.reference import greedy, logprobs_of

PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16]]


def requests_for(prompts):
    return [GeneratedSequence(p).to_request(i) for i, p in enumerate(prompts)]


def never():
    return False


def run(model, settings, prompts=PROMPTS, stop_ids=(), interrupted=never):
    return decode(model, requests_for(prompts), settings, frozenset(stop_ids), interrupted)


def test_greedy_tokens_and_logprobs_of_a_batch(first_model):
    found = run(first_model, SamplingSettings(12, temperature=0.0))
    for prompt, sequence in zip(PROMPTS, found, strict=True):
        assert sequence.new_tokens == greedy(first_model, prompt, 12)
        expected = logprobs_of(first_model, [*prompt, *sequence.new_tokens])[len(prompt) - 1 :]
        assert sequence.logprobs == pytest.approx(expected, abs=1e-4)
        assert sequence.finish_reason == "length"
    assert len({tuple(sequence.new_tokens) for sequence in found}) == 3


def test_samples_do_not_depend_on_the_batch_or_on_interruptions(first_model):
    settings = SamplingSettings(10, temperature=0.8, seed=3)
    whole = run(first_model, settings)
    expected = logprobs_of(first_model, [*PROMPTS[2], *whole[2].new_tokens], temperature=0.8)
    assert whole[2].logprobs == pytest.approx(expected[len(PROMPTS[2]) - 1 :], abs=1e-4)
    steps = itertools.count()
    halves = run(first_model, settings, interrupted=lambda: next(steps) == 4)
    assert [(len(s.new_tokens), s.finish_reason) for s in halves] == [(4, "abort")] * 3
    last = GeneratedSequence(PROMPTS[2], halves[2].new_tokens)
    rest = decode(first_model, [last.to_request(2)], settings, frozenset(), never)[0]
    assert halves[2].new_tokens + rest.new_tokens == whole[2].new_tokens
    other_seed = run(first_model, SamplingSettings(10, temperature=0.8, seed=4))
    assert other_seed[2].new_tokens != whole[2].new_tokens


def test_stop_tokens_end_one_sequence_and_not_the_others(first_model):
    stop = greedy(first_model, PROMPTS[0], 4)[3]
    first, *others = run(first_model, SamplingSettings(8, temperature=0.0), stop_ids=[stop])
    assert first.new_tokens[-1] == stop
    assert first.finish_reason == "stop"
    assert len(first.new_tokens) == len(first.logprobs) <= 4
    assert any(len(sequence.new_tokens) == 8 for sequence in others)


def test_drawing_follows_the_distribution():
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.2])
    logits = probabilities.log().expand(20_000, 4)
    sequences = [OpenSequence([1], 1, random.Random(i)) for i in range(20_000)]
    tokens, logprobs = choose_tokens(logits, 1.0, sequences)
    shares = torch.bincount(tokens, minlength=4) / 20_000
    assert shares[1] == 0
    assert torch.allclose(shares, probabilities, atol=0.015)
    assert torch.allclose(logprobs, probabilities.log()[tokens])


@pytest.mark.parametrize(
    ("prompts", "num_new", "words"),
    [
        ([[1, 512]], 1, r"prompts\[0\]=512: token ids from 0 to 511"),
        ([[1], []], 1, r"prompts\[1\]=\[\]"),
        ([], 1, "give at least one"),
        ([[1] * 10], 4090, "reach 4100: the model has 4096 positions"),
    ],
)
def test_what_the_model_cannot_take_is_refused(first_model, prompts, num_new, words):
    with pytest.raises(ConfigError, match=words):
        run(first_model, SamplingSettings(num_new), prompts)
