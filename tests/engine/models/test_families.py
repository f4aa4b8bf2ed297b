"""The table against transformers' own modules: names, classes, biases, norms, windows."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from fsdpbench.engine.models.facts import build_model_facts
from fsdpbench.engine.models.families import FAMILIES, has_experts

SMALL = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 7,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "vocab_size": 320,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA_BIASES = {"attention_bias": True, "mlp_bias": True}
# name -> (model type, keys beside SMALL)
VARIANTS = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", LLAMA_BIASES),
    "llama plain heads": ("llama", {"num_key_value_heads": None, "head_dim": None}),
    "mistral": ("mistral", {}),
    "mistral full": ("mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"head_dim": 16}),
    "qwen2 sliding": (
        "qwen2",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 tied biases": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3 layer types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention"] * 3 + ["full_attention"],
        },
    ),
    "gemma3": ("gemma3_text", {}),
    "gemma3 untied": ("gemma3_text", {"tie_word_embeddings": False, "sliding_window": 16}),
    "gemma3 pattern": ("gemma3_text", {"sliding_window_pattern": 3, "attention_bias": True}),
}


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=VARIANTS)
def built(request):
    model_type, extra = request.param
    content = {"model_type": model_type, **SMALL, **extra}
    content = {key: value for key, value in content.items() if value is not None or key in extra}
    config = AutoConfig.for_model(**content)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return model, content


def layers_of(model, family):
    return list(model.get_submodule(family.layers))


def test_parameter_count_is_exact(built):
    model, content = built
    assert build_model_facts(content).num_parameters == sum(p.numel() for p in model.parameters())


def test_a_saved_config_gives_the_same_facts(built, tmp_path):
    model, content = built
    model.config.save_pretrained(tmp_path)
    from fsdpbench.engine.models.facts import read_model_facts

    assert read_model_facts(str(tmp_path)) == build_model_facts(content)


def test_every_module_with_weights_is_named_in_the_row(built):
    model, content = built
    family = FAMILIES[content["model_type"]]
    whole = {family.embedding, family.final_norm, family.head}
    per_layer = (
        *family.layer_norms,
        *family.query_key_norms,
        *family.column_parallel,
        *family.row_parallel,
    )
    layers = layers_of(model, family)
    named = whole | {
        f"{family.layers}.{index}.{path}" for index in range(len(layers)) for path in per_layer
    }
    owners = {name.rpartition(".")[0] for name, _ in model.named_parameters(remove_duplicate=False)}
    assert owners == named
    assert model.get_submodule(family.base_model) is model.base_model


def test_classes_and_shapes(built):
    model, content = built
    family, facts = FAMILIES[content["model_type"]], build_model_facts(content)
    layers = layers_of(model, family)
    assert {type(layer).__name__ for layer in layers} == {family.decoder_layer_cls}
    present = {type(module).__name__ for module in model.modules()}
    assert set(family.wrappable_classes) <= present
    query, key, value = (layers[0].get_submodule(path) for path in family.column_parallel[:3])
    assert query.weight.shape == (facts.num_attention_heads * facts.head_dim, facts.hidden_size)
    assert key.weight.shape == (facts.num_key_value_heads * facts.head_dim, facts.hidden_size)
    assert value.weight.shape == key.weight.shape
    for path in (*family.column_parallel, *family.row_parallel):
        assert isinstance(layers[0].get_submodule(path), nn.Linear)
    for path in family.query_key_norms:
        assert layers[0].get_submodule(path).weight.shape == (facts.head_dim,)


def test_windows_are_those_of_the_layers(built):
    model, content = built
    family = FAMILIES[content["model_type"]]
    attentions = [layer.self_attn for layer in layers_of(model, family)]
    if content["model_type"] == "mistral":  # its layers read the config in forward
        windows = tuple(model.config.sliding_window for _ in attentions)
    else:
        windows = tuple(getattr(attention, "sliding_window", None) for attention in attentions)
    assert build_model_facts(content).layer_windows == windows


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        ({"num_experts": 64}, True),
        ({"num_local_experts": 8}, True),
        ({"n_routed_experts": 256}, True),
        ({"num_experts": 1}, False),
        ({"num_local_experts": 0}, False),
        ({"num_experts": None}, False),
        ({}, False),
    ],
)
def test_experts_are_seen(content, answer):
    assert has_experts(content) is answer


@pytest.mark.parametrize(
    "model_type", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "olmoe", "gpt_oss"]
)
def test_experts_are_seen_in_transformers_own_defaults(model_type):
    assert has_experts(AutoConfig.for_model(model_type).to_dict())
