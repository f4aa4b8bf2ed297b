"""Reading config.json: numbers derived by hand, and refusals with their reasons."""

from __future__ import annotations

import json

import pytest
from huggingface_hub import constants

from fsdpbench.engine.models.facts import build_model_facts, read_model_config, read_model_facts
from fsdpbench.engine.models.presets import PRESETS
from fsdpbench.errors import ConfigError

LLAMA = {
    "model_type": "llama",
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 30,
}


def message_of(build):
    with pytest.raises(ConfigError) as caught:
        build()
    return str(caught.value)


def test_facts_by_hand():
    facts = build_model_facts(LLAMA)
    assert (facts.head_dim, facts.num_layers, facts.decoder_layer_cls) == (
        3,
        3,
        "LlamaDecoderLayer",
    )
    assert (facts.tie_word_embeddings, facts.layer_windows) == (False, (None, None, None))
    attention = 12 * 12 + 2 * 12 * 6 + 12 * 12
    layer = attention + 3 * 12 * 20 + 2 * 12
    assert facts.num_parameters == 3 * layer + 30 * 12 + 12 + 30 * 12


def test_soft_caps_and_direction_are_read():
    gemma = {**LLAMA, "model_type": "gemma3_text", "head_dim": 3}
    facts = build_model_facts({**gemma, "final_logit_softcapping": 30.0})
    assert (facts.final_logit_softcapping, facts.attention_softcapping) == (30.0, None)
    assert facts.bidirectional is False
    facts = build_model_facts(
        {**gemma, "attn_logit_softcapping": 50.0, "use_bidirectional_attention": True}
    )
    assert (facts.attention_softcapping, facts.bidirectional) == (50.0, True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, ["mixture of experts", "Archon-like"]),
        ({"model_type": "qwen3_vl", "text_config": {"num_experts": 8}}, ["mixture of experts"]),
        ({"model_type": "qwen3_vl", "text_config": LLAMA}, ["multimodal", "not available yet"]),
        ({"model_type": "mamba"}, ["'mamba'", "llama, mistral, qwen2, qwen3, gemma3_text"]),
        ({"model_type": None}, ["None", "families"]),
        ({"model_type": ["llama"]}, ["['llama']", "families"]),
        ({"quantization_config": {"bits": 4}}, ["quantized"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["'dynamic'", "many lengths"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, ["'longrope'"]),
        ({"hidden_size": None, "vocab_size": "30"}, ["hidden_size, vocab_size"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers"]),
    ],
)
def test_models_that_cannot_be_trained(changes, words):
    message = message_of(lambda: build_model_facts({**LLAMA, **changes}, "some/where"))
    assert message.startswith("path='some/where': ")
    assert all(word in message for word in words), message


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_presets_folders_and_cached_hub_ids_are_read(tmp_path, hub_cache):
    assert read_model_config("tiny-llama") == PRESETS["tiny-llama"]
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert read_model_facts(str(folder)) == build_model_facts(LLAMA)
    snapshot = hub_cache / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 31}))
    assert "org/name" in message_of(lambda: read_model_facts("org/name"))  # no main revision yet
    (hub_cache / "models--org--name" / "refs").mkdir()
    (hub_cache / "models--org--name" / "refs" / "main").write_text("abc")
    assert read_model_facts("org/name").vocab_size == 31


@pytest.mark.parametrize("path", ["", "nowhere", "org/absent", "/no/such/folder", "a/b/c"])
def test_what_is_nowhere_is_said_with_the_presets(path, hub_cache):
    message = message_of(lambda: read_model_facts(path))
    assert "tiny-qwen3" in message
    assert message.startswith(f"path={path!r}: ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "is no JSON"),
        (None, "does not exist"),
        ("{", "is no JSON"),
        ("[]", "JSON object"),
        ("\xff", "is no JSON"),
    ],
)
def test_broken_folders(tmp_path, text, words):
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    assert words in message_of(lambda: read_model_facts(str(tmp_path)))


def test_presets_cannot_be_changed_through_a_reader():
    read_model_config("tiny-llama")["hidden_size"] = 1
    assert PRESETS["tiny-llama"]["hidden_size"] == 128
