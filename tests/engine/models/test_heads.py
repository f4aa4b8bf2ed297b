"""The policy model without a mesh; on meshes it is compared in test_parallelize."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fsdpbench.engine.batching.packing import pack
from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.device import Device
from fsdpbench.engine.models.load import build_meta_model
from fsdpbench.engine.models.preset_files import prepare_preset
from fsdpbench.engine.parallel.attention import build_attention_context
from fsdpbench.engine.parallel.materialize import allocate_shards, fill_parameters
from fsdpbench.engine.parallel.seeded_weights import SeededWeights


@pytest.fixture
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("FSDPBENCH_CACHE", str(tmp_path))
    source = prepare_preset("tiny-qwen3", with_weights=False)
    model = build_meta_model(TrainEngineConfig(path="tiny-qwen3", logprobs_chunk_size=4), source)
    allocate_shards(model, Device("cpu"))
    weights = SeededWeights(1, 0.2, torch.device("cpu"), model.initial_values)
    fill_parameters(dict(model.named_hf_parameters()), weights)
    return model


def run(model, group, lengths, **arguments):
    width = max(lengths)
    batch = {
        "input_ids": torch.arange(len(lengths) * width).view(len(lengths), width),
        "attention_mask": torch.arange(width) < torch.tensor(lengths)[:, None],
    }
    packed = pack(batch, list(range(len(lengths))))
    context = build_attention_context(packed, group, model.attention_kernel)
    tokens = packed.tokens
    with torch.no_grad():
        return model(
            tokens["input_ids"][None],
            tokens["position_ids"][None],
            tokens["labels"],
            context,
            **arguments,
        )


def test_names_are_those_of_a_checkpoint_and_ties_appear_once(model):
    names = [name for name, _ in model.named_hf_parameters()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert not any(name.startswith("backbone") for name in names)


def test_adapters_are_named_as_in_their_files_and_the_base_as_without_them(model):
    source = prepare_preset("tiny-qwen3", with_weights=False)
    config = TrainEngineConfig(path="tiny-qwen3", use_lora=True, target_modules=["q_proj"])
    adapted = build_meta_model(config, source)
    base = [name for name, _ in adapted.named_hf_parameters()]
    assert base == [name for name, _ in model.named_hf_parameters()]
    names = [name for name, _ in adapted.named_adapter_parameters()]
    assert len(names) == 2 * model.facts.num_layers
    assert names[0] == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert [name for name, _ in adapted.named_trainable_parameters()] == names
    assert [name for name, _ in model.named_trainable_parameters()] == base


def test_entropy_comes_when_asked_for(model, world):
    logprobs, entropy = run(model, world, [5, 3])
    assert entropy is None
    again, entropy = run(model, world, [5, 3], with_entropy=True)
    assert torch.equal(logprobs, again)
    assert entropy.shape == logprobs.shape == (8,)
    assert (entropy[:4] > 0).all()


def test_last_tokens_predict_nothing(model, world):
    logprobs, _ = run(model, world, [5, 3])
    assert logprobs[[4, 7]].tolist() == [0.0, 0.0]
    assert (logprobs[[0, 1, 2, 3, 5, 6]] < 0).all()


def test_temperature_flattens(model, world):
    _, sharp = run(model, world, [8], temperature=0.5, with_entropy=True)
    _, flat = run(model, world, [8], temperature=5.0, with_entropy=True)
    assert (flat[:-1] > sharp[:-1]).all()


def test_packing_does_not_change_a_sequence(model, world):
    together, _ = run(model, world, [6, 6])
    alone, _ = run(model, world, [6])
    assert (together[:6] - alone).abs().max() < 1e-5
