"""What a path means, and the model that is built from it."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.models.load import (
    build_meta_model,
    disable_dropout_of,
    load_hf_config,
    load_tokenizer,
    resolve_path,
)
from fsdpbench.engine.models.preset_files import prepare_preset
from fsdpbench.errors import ConfigError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FSDPBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_a_preset_is_a_folder_with_or_without_weights(cache):
    with_weights = resolve_path(TrainEngineConfig(path="tiny-llama"))
    bare = resolve_path(TrainEngineConfig(path="tiny-llama", init_from_scratch=True))
    assert (with_weights / "model.safetensors").is_file()
    assert not (bare / "model.safetensors").exists()
    assert with_weights != bare
    assert load_hf_config(bare).hidden_size == 128


def test_a_local_folder_is_itself(cache):
    folder = prepare_preset("tiny-llama", with_weights=False)
    assert resolve_path(TrainEngineConfig(path=str(folder))) == folder.resolve()


@pytest.mark.parametrize("path", ["", "no-such-model", "org/not-in-the-cache"])
def test_a_path_that_is_nothing_is_refused_with_what_it_may_be(cache, path):
    with pytest.raises(ConfigError, match="presets: tiny-qwen3"):
        resolve_path(TrainEngineConfig(path=path))


def test_a_hub_id_is_found_in_the_cache_without_network(cache, monkeypatch):
    from huggingface_hub import constants

    hub = cache / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    model = hub / "models--org--tiny"
    snapshot = model / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    source = prepare_preset("tiny-llama", with_weights=False)
    (snapshot / "config.json").write_text((source / "config.json").read_text())
    assert resolve_path(TrainEngineConfig(path="org/tiny")) == snapshot


def test_presets_have_no_tokenizer(cache):
    assert load_tokenizer(prepare_preset("tiny-llama", with_weights=False)) is None


def test_master_weights_have_the_optimizers_dtype(cache):
    source = prepare_preset("tiny-qwen3", with_weights=False)
    config = TrainEngineConfig(path="tiny-qwen3", optimizer_dtype="bfloat16")
    model = build_meta_model(config, source)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.training
    assert model.logprobs_chunk_size == config.logprobs_chunk_size


def test_adapters_have_the_optimizers_dtype_and_the_base_the_computations(cache):
    source = prepare_preset("tiny-qwen3", with_weights=False)
    config = TrainEngineConfig(
        path="tiny-qwen3", use_lora=True, lora_rank=4, target_modules=["q_proj"]
    )
    model = build_meta_model(config, source)
    assert {p.dtype for _, p in model.named_hf_parameters()} == {torch.bfloat16}
    assert {p.dtype for _, p in model.named_adapter_parameters()} == {torch.float32}
    assert model.adapters.targets == ("q_proj",)
    config = config.with_changes({"target_modules": ["lm_head"]})
    with pytest.raises(ConfigError, match="is the head, which gets no adapter"):
        build_meta_model(config, source)


def test_dropout_can_be_switched_off(cache):
    config = LlamaConfig(attention_dropout=0.3)
    disable_dropout_of(config)
    assert config.attention_dropout == 0.0
    folder = cache / "dropping"
    LlamaConfig(attention_dropout=0.3, num_hidden_layers=1, hidden_size=32).save_pretrained(folder)
    for disabled, wanted in ((False, 0.3), (True, 0.0)):
        model = build_meta_model(
            TrainEngineConfig(path=str(folder), disable_dropout=disabled), folder
        )
        assert model.backbone.model.layers[0].self_attn.attention_dropout == wanted
