"""Names of target modules against the layers that models have."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from fsdpbench.engine.models.adapter_targets import (
    check_targets,
    is_target,
    list_linear_layers,
    list_target_names,
    resolve_targets,
)
from fsdpbench.engine.models.facts import read_model_facts
from fsdpbench.engine.models.families import FAMILIES
from fsdpbench.engine.models.meta import build_meta_backbone
from fsdpbench.engine.models.presets import PRESETS
from fsdpbench.errors import ConfigError

ALL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "o_proj", "down_proj")
FACTS = read_model_facts("tiny-llama")


def test_no_name_means_every_linear_layer_of_the_decoder():
    assert resolve_targets((), FACTS) == ALL
    assert all(list_target_names(family) for family in FAMILIES.values())


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen3"])
def test_the_listed_layers_are_those_of_the_model(preset):
    backbone, _ = build_meta_backbone(AutoConfig.for_model(**PRESETS[preset]), torch.float32)
    linear = {name for name, module in backbone.named_modules() if isinstance(module, nn.Linear)}
    assert set(list_linear_layers(read_model_facts(preset))) == linear - {"lm_head"}


@pytest.mark.parametrize(
    "names", [("q_proj",), ("mlp.up_proj", "o_proj"), ("layers.0.mlp.up_proj",)]
)
def test_names_that_end_a_path_are_taken_as_they_are(names):
    assert resolve_targets(names, FACTS) == names


def test_a_name_ends_a_path_by_whole_words():
    assert is_target("model.layers.0.self_attn.q_proj", ["q_proj"])
    assert not is_target("model.layers.0.self_attn.q_proj", ["proj"])
    assert is_target("q_proj", ["q_proj"])


def test_names_that_mean_nothing_are_listed_with_those_that_exist():
    with pytest.raises(ConfigError) as raised:
        resolve_targets(("q_proj", "query", "layers.9.mlp.up_proj", "input_layernorm"), FACTS)
    wrong = [violation.found for violation in raised.value.violations]
    assert wrong == ["'query'", "'layers.9.mlp.up_proj'", "'input_layernorm'"]
    text = str(raised.value)
    assert "is the name of no linear layer of this llama model" in text
    assert "linear layers: q_proj, k_proj, v_proj, gate_proj, up_proj, o_proj, down_proj" in text


@pytest.mark.parametrize(
    ("name", "what"), [("lm_head", "the head"), ("embed_tokens", "the embedding")]
)
def test_the_vocabulary_gets_no_adapter(name, what):
    (violation,) = check_targets([name], FACTS)
    assert f"target_modules='{name}': is {what}, which gets no adapter" in str(violation)
