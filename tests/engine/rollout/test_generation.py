"""Requests and the sequences that answers are put together to."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from fsdpbench.engine.rollout.generation import (
    GeneratedSequence,
    SamplingSettings,
    build_request,
)
from fsdpbench.errors import ConfigError


def test_a_sequence_grows_over_versions():
    first, second = GeneratedSequence([1, 2]), GeneratedSequence([3])
    first.extend({"tokens": [7], "logprobs": [-0.5], "version": 4, "finish_reason": "abort"})
    second.extend({"tokens": [8], "logprobs": [-0.1], "version": 4, "finish_reason": "stop"})
    settings = SamplingSettings(4, temperature=0.5, seed=3, stop_token_ids=(8,))
    request = json.loads(json.dumps(build_request([second, first], settings)))
    assert request["sequences"] == [{"index": 1, "tokens": [1, 2, 7], "num_done": 1}]
    assert SamplingSettings.from_json(request["settings"]) == settings
    first.extend({"tokens": [9, 8], "logprobs": [-1, -2], "version": 5, "finish_reason": "stop"})
    assert first == GeneratedSequence([1, 2], [7, 9, 8], [-0.5, -1, -2], [4, 5, 5], "stop")
    assert first.is_finished


def test_settings_travel_without_stop_tokens():
    settings = SamplingSettings(1)
    assert SamplingSettings.from_json(asdict(settings)) == settings


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": 1, "temperature": -1.0}, r"temperature=-1\.0"),
        ({"max_new_tokens": 1, "temperature": float("nan")}, "temperature=nan"),
    ],
)
def test_settings_that_make_no_sense_are_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        SamplingSettings(**values)
