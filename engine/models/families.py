"""Facts of the dense decoder families, as a table: the one place that knows a model type by name.

Module paths are those of `transformers`' causal language models. Everything that depends on a
family reads a row; adding a family means adding a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ATTENTION_INPUTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ATTENTION_OUTPUT = "self_attn.o_proj"
MLP_INPUTS = ("mlp.gate_proj", "mlp.up_proj")
MLP_OUTPUT = "mlp.down_proj"


@dataclass(frozen=True)
class Family:
    """One row. Paths below a layer are relative to it, the others to the causal model."""

    model_type: str
    class_prefix: str  # of transformers' class names
    layer_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    query_key_norms: tuple[str, ...] = ()  # norms over head_dim, shared by all heads
    column_parallel: tuple[str, ...] = ATTENTION_INPUTS + MLP_INPUTS
    row_parallel: tuple[str, ...] = (ATTENTION_OUTPUT, MLP_OUTPUT)
    base_model: str = "model"
    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    # biases: a fixed answer, or the key of the model's config that decides
    query_key_value_bias: bool | str = False
    attention_output_bias: bool | str = False
    mlp_bias: bool | str = False
    # what transformers' config class fills in when config.json leaves a key out
    config_defaults: Mapping[str, Any] = field(default_factory=dict)
    windows: str = "none"  # which layers slide: none, all, upper (max_window_layers on), pattern

    @property
    def decoder_layer_cls(self) -> str:
        """Class name of one layer, the default FSDP unit."""
        return f"{self.class_prefix}DecoderLayer"

    @property
    def wrappable_classes(self) -> tuple[str, ...]:
        """Class names that a wrap policy may name."""
        return tuple(self.class_prefix + part for part in ("DecoderLayer", "Attention", "MLP"))


_QWEN_DEFAULTS = {"tie_word_embeddings": False, "sliding_window": 4096, "max_window_layers": 28}

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            "llama",
            "Llama",
            query_key_value_bias="attention_bias",
            attention_output_bias="attention_bias",
            mlp_bias="mlp_bias",
        ),
        Family(
            "mistral",
            "Mistral",
            config_defaults={"num_key_value_heads": 8, "sliding_window": 4096},
            windows="all",
        ),
        Family(
            "qwen2",
            "Qwen2",
            query_key_value_bias=True,
            config_defaults=_QWEN_DEFAULTS,
            windows="upper",
        ),
        Family(
            "qwen3",
            "Qwen3",
            query_key_norms=("self_attn.q_norm", "self_attn.k_norm"),
            query_key_value_bias="attention_bias",
            attention_output_bias="attention_bias",
            config_defaults={**_QWEN_DEFAULTS, "head_dim": 128},
            windows="upper",
        ),
        Family(
            "gemma3_text",
            "Gemma3",
            layer_norms=(
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ),
            query_key_norms=("self_attn.q_norm", "self_attn.k_norm"),
            query_key_value_bias="attention_bias",
            attention_output_bias="attention_bias",
            config_defaults={
                "tie_word_embeddings": True,
                "head_dim": 256,
                "num_key_value_heads": 4,
                "sliding_window": 4096,
                "sliding_window_pattern": 6,
                "vocab_size": 262208,
            },
            windows="pattern",
        ),
    )
}

# any of these keys with a value above 1 reveals a mixture of experts
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def has_experts(model_config: Mapping[str, Any]) -> bool:
    """Tell from a model's config whether it is a mixture of experts."""
    counts = (model_config.get(key) for key in EXPERT_KEYS)
    return any(isinstance(count, int) and count > 1 for count in counts)
