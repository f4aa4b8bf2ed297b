"""Meta models: no storage for matrices, real buffers, and the constructors' vectors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from fsdpbench.engine.models.meta import (
    EmptyOnMeta,
    build_meta_backbone,
    check_own_model_code,
    move_parameters_to_meta,
)
from fsdpbench.engine.models.presets import PRESETS
from fsdpbench.engine.parallel.attention import REGISTERED_NAME
from fsdpbench.errors import ConfigError

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text"])
def test_buffers_equal_those_of_a_real_model(model_type):
    config = AutoConfig.for_model(model_type, **SMALL, vocab_size=64, pad_token_id=None)
    meta, _ = build_meta_backbone(config, torch.float32)
    real = AutoModelForCausalLM.from_config(config)
    buffers = dict(real.named_buffers())
    assert buffers
    for name, buffer in meta.named_buffers():
        assert torch.equal(buffer, buffers.pop(name)), name
    assert not buffers


@pytest.mark.parametrize(("model_type", "norm"), [("llama", 1.0), ("gemma3_text", 0.0)])
def test_norms_report_what_their_constructor_gave_them(model_type, norm):
    config = AutoConfig.for_model(model_type, **SMALL, vocab_size=64, pad_token_id=None)
    model, values = build_meta_backbone(config, torch.float32)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert set(values) == {name for name, p in model.named_parameters() if p.ndim == 1}
    assert all(torch.equal(value, torch.full_like(value, norm)) for value in values.values())


def test_dtype_ties_and_attention_of_the_built_model():
    config = AutoConfig.for_model(**PRESETS["tiny-qwen3"])
    model, _ = build_meta_backbone(config, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert model.config._attn_implementation == REGISTERED_NAME


def test_a_70b_model_costs_no_memory():
    config = AutoConfig.for_model(**{**PRESETS["llama3-70b"], "num_hidden_layers": 2})
    model, values = build_meta_backbone(config, torch.float32)
    held = [*values.values(), *model.buffers()]
    assert sum(tensor.numel() for tensor in held) < 100_000
    assert sum(p.numel() for p in model.parameters()) > 3_000_000_000


def test_only_matrices_are_kept_from_being_made():
    with EmptyOnMeta():
        assert torch.empty(2).is_meta
        assert torch.arange(3).tolist() == [0, 1, 2]
    assert not torch.empty(2).is_meta
    module = nn.LayerNorm(2)
    values = move_parameters_to_meta(module)
    assert values["weight"].tolist() == [1.0, 1.0]
    assert module.weight.is_meta
    assert module.weight.requires_grad


def test_model_code_that_came_with_the_weights_is_refused():
    class LlamaForCausalLM(nn.Module):
        pass

    with pytest.raises(ConfigError, match=r"trust_remote_code=True, which brings .*LlamaForCausal"):
        check_own_model_code(LlamaForCausalLM())
