"""Plans follow the family rows and name modules that the models have."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from fsdpbench.engine.models.families import FAMILIES
from fsdpbench.engine.models.meta import build_meta_backbone
from fsdpbench.engine.parallel.tensor_plans import TensorStyle, plan_layer, plan_model


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_parameter_of_a_model_has_a_style(family):
    config = AutoConfig.for_model(
        family.model_type,
        num_hidden_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=32,
        vocab_size=64,
        pad_token_id=None,
    )
    backbone, _ = build_meta_backbone(config, torch.float32)
    styled = set(plan_model(family))
    styled |= {f"{family.layers}.0.{path}" for path in plan_layer(family)}
    with_parameters = {
        name
        for name, module in backbone.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    }
    assert with_parameters <= styled
    for name in styled:
        assert isinstance(backbone.get_submodule(name), nn.Module)


def test_qwen3_layer_in_full():
    assert plan_layer(FAMILIES["qwen3"]) == {
        "input_layernorm": TensorStyle.SEQUENCE,
        "post_attention_layernorm": TensorStyle.SEQUENCE,
        "self_attn": TensorStyle.GATHER,
        "mlp": TensorStyle.GATHER,
        "self_attn.q_proj": TensorStyle.COLUMN,
        "self_attn.k_proj": TensorStyle.COLUMN,
        "self_attn.v_proj": TensorStyle.COLUMN,
        "mlp.gate_proj": TensorStyle.COLUMN,
        "mlp.up_proj": TensorStyle.COLUMN,
        "self_attn.o_proj": TensorStyle.ROW,
        "mlp.down_proj": TensorStyle.ROW,
        "self_attn.q_norm": TensorStyle.HEADS,
        "self_attn.k_norm": TensorStyle.HEADS,
    }
