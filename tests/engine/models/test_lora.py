"""Adapters in a meta-device model: which parameters it has then, and of what kind."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import AutoConfig

from fsdpbench.engine.models.lora import AdapterSettings, inject_adapters
from fsdpbench.engine.models.meta import build_meta_backbone
from fsdpbench.engine.models.presets import PRESETS
from fsdpbench.errors import ConfigError

SETTINGS = AdapterSettings(rank=4, alpha=8, targets=("q_proj", "layers.1.mlp.down_proj"))


def build_backbone():
    config = AutoConfig.for_model(**{**PRESETS["tiny-qwen3"], "num_hidden_layers": 2})
    return build_meta_backbone(config, torch.bfloat16)[0]


def test_adapters_are_all_that_trains_and_have_their_own_dtype():
    backbone = build_backbone()
    before = {name: tuple(p.shape) for name, p in backbone.named_parameters()}
    inject_adapters(backbone, SETTINGS, torch.float32)
    shapes = {}
    for name, parameter in backbone.named_parameters():
        assert parameter.is_meta, name
        assert parameter.requires_grad == ("lora_" in name), name
        wanted = torch.float32 if parameter.requires_grad else torch.bfloat16
        assert parameter.dtype == wanted, name
        if parameter.requires_grad:
            shapes[name] = tuple(parameter.shape)
        else:
            assert before.pop(name.replace(".base_layer.", ".")) == tuple(parameter.shape)
    assert not before
    assert shapes == {
        "model.layers.0.self_attn.q_proj.lora_A.default.weight": (4, 128),
        "model.layers.0.self_attn.q_proj.lora_B.default.weight": (128, 4),
        "model.layers.1.self_attn.q_proj.lora_A.default.weight": (4, 128),
        "model.layers.1.self_attn.q_proj.lora_B.default.weight": (128, 4),
        "model.layers.1.mlp.down_proj.lora_A.default.weight": (4, 256),
        "model.layers.1.mlp.down_proj.lora_B.default.weight": (128, 4),
    }
    assert backbone.lm_head.weight is backbone.model.embed_tokens.weight


def test_without_peft_the_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match="use_lora=True: needs the package peft; run pip install"):
        inject_adapters(build_backbone(), SETTINGS, torch.float32)
