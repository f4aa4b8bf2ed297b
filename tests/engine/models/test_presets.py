"""Every preset is a configuration that transformers builds."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fsdpbench.engine.models.facts import build_model_facts, read_model_facts
from fsdpbench.engine.models.presets import PRESETS

PUBLISHED_PARAMETERS = {  # of the model cards, in billions, tied heads counted once
    "qwen3-0.6b": 0.6,
    "qwen3-1.7b": 1.72,
    "qwen3-4b": 4.0,
    "qwen3-8b": 8.2,
    "qwen3-14b": 14.8,
    "qwen3-32b": 32.8,
    "llama3-8b": 8.03,
    "llama3-70b": 70.6,
    "smollm2-135m": 0.135,
}


@pytest.mark.parametrize("name", PRESETS)
def test_transformers_builds_it_with_the_parameters_that_facts_say(name):
    config = AutoConfig.for_model(**PRESETS[name])
    assert config.architectures == [
        {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[config.model_type]
    ]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    facts = read_model_facts(name)
    assert sum(p.numel() for p in model.parameters()) == facts.num_parameters
    assert config.rope_parameters["rope_theta"] == PRESETS[name]["rope_theta"]
    assert model.dtype == getattr(torch, PRESETS[name]["torch_dtype"])
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == facts.tie_word_embeddings


@pytest.mark.parametrize(("name", "billions"), PUBLISHED_PARAMETERS.items())
def test_sizes_are_the_published_ones(name, billions):
    count = build_model_facts(PRESETS[name]).num_parameters / 1e9
    assert count == pytest.approx(billions, rel=0.01)


def test_tiny_ones_exercise_grouped_heads_and_both_kinds_of_head():
    tied = {name: PRESETS[name]["tie_word_embeddings"] for name in ("tiny-qwen3", "tiny-llama")}
    assert tied == {"tiny-qwen3": True, "tiny-llama": False}
    for name in tied:
        facts = read_model_facts(name)
        assert (facts.num_attention_heads, facts.num_key_value_heads, facts.head_dim) == (8, 2, 16)
        assert (facts.hidden_size, facts.num_layers, facts.vocab_size) == (128, 4, 512)
