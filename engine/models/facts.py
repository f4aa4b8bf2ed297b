"""What a model's `config.json` says, as numbers: no torch, no weights, no network.

parameters = layers x (attention + mlp + norms) + embedding + final norm (+ head unless tied)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants as hub

from fsdpbench.engine.config.parallel import ENGINE_SELECTION
from fsdpbench.engine.models.families import FAMILIES, Family, has_experts
from fsdpbench.engine.models.presets import PRESETS
from fsdpbench.errors import ConfigError, Violation, list_names

COUNTS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
)


@dataclass(frozen=True)
class ModelFacts:
    """The numbers of one model that checks, plans and FLOP counts need."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    num_parameters: int  # a tied head counts once
    layer_windows: tuple[int | None, ...]  # attention window of each layer; None sees all before it
    final_logit_softcapping: float | None = None
    attention_softcapping: float | None = None
    bidirectional: bool = False

    @property
    def family(self) -> Family:
        """The family's row."""
        return FAMILIES[self.model_type]

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes (out, in) of the linear maps of one layer, by the last word of their paths."""
        hidden, inner = self.hidden_size, self.intermediate_size
        query = self.num_attention_heads * self.head_dim
        key = self.num_key_value_heads * self.head_dim
        return {
            "q_proj": (query, hidden),
            "k_proj": (key, hidden),
            "v_proj": (key, hidden),
            "o_proj": (hidden, query),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }

    @property
    def decoder_layer_cls(self) -> str:
        """Class name of one layer in transformers."""
        return self.family.decoder_layer_cls


def read_model_facts(path: str) -> ModelFacts:
    """Read the facts of a preset, a local Hugging Face folder or a hub id that is in the cache."""
    return build_model_facts(read_model_config(path), path)


def read_model_config(path: str) -> dict[str, Any]:
    """Return the contents of `config.json` of a preset, a local folder or a cached hub id."""
    if path in PRESETS:
        return dict(PRESETS[path])
    folder = Path(path).expanduser()
    file = folder / "config.json" if folder.is_dir() else _find_in_hub_cache(path)
    if file is None or not path:
        raise ConfigError(
            [
                Violation(
                    "path",
                    repr(path),
                    "is no preset, no local folder and not in the Hugging Face cache",
                    f"presets: {', '.join(PRESETS)}; or download the model first",
                )
            ]
        )
    if not file.is_file():
        raise ConfigError(
            [Violation("path", repr(path), f"{file} does not exist", "give a Hugging Face folder")]
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or nested too deep
        raise ConfigError([Violation("path", repr(path), f"{file} is no JSON: {error}")]) from None
    if not isinstance(content, dict):
        raise ConfigError([Violation("path", repr(path), f"{file} must hold a JSON object")])
    return content


def build_model_facts(model_config: Mapping[str, Any], path: str = "") -> ModelFacts:
    """Derive the facts from the contents of a `config.json`; `path` is for messages."""
    problem = _find_problem(model_config)
    if problem:
        raise ConfigError([Violation("path", repr(path), *problem)])
    family = FAMILIES[model_config["model_type"]]
    values = {**family.config_defaults, **model_config}
    heads = values["num_attention_heads"]
    return ModelFacts(
        model_type=family.model_type,
        num_layers=values["num_hidden_layers"],
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or values["hidden_size"] // heads,
        vocab_size=values["vocab_size"],
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        num_parameters=_count_parameters(family, values),
        layer_windows=_list_windows(family, values),
        final_logit_softcapping=values.get("final_logit_softcapping"),
        attention_softcapping=values.get("attn_logit_softcapping"),
        bidirectional=bool(values.get("use_bidirectional_attention")),
    )


def _find_problem(model_config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Say why this model cannot be trained here, and what to do."""
    model_type = model_config.get("model_type")
    text_config = model_config.get("text_config") or {}
    if has_experts(model_config) or has_experts(text_config):
        reason = f"holds a mixture of experts ({model_type}): {ENGINE_SELECTION['moe']}"
        return reason, "the FSDP engine trains dense models"
    if text_config:
        return f"is a multimodal model ({model_type})", "not available yet; use a text model"
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        reason = f"has model_type {model_type!r}, which is no known family"
        return reason, f"families: {', '.join(FAMILIES)}"
    scaling = _find_scaling_by_length(model_config)
    if scaling:
        reason = f"scales rotary embeddings by the length of its input (rope_type {scaling!r})"
        return reason, "a packed row has many lengths; remove the scaling, or use linear or yarn"
    if model_config.get("quantization_config"):
        return "holds quantized weights", "use the unquantized checkpoint"
    values = {**FAMILIES[model_type].config_defaults, **model_config}
    wrong = [key for key in COUNTS if type(values.get(key)) is not int or values[key] < 1]
    if wrong:
        return f"has a config.json without a count for {list_names(wrong)}", "mend the file"
    return None


def _find_scaling_by_length(model_config: Mapping[str, Any]) -> str | None:
    """Return a rotary type that depends on the input's longest position; None if there is none."""
    for key in ("rope_scaling", "rope_parameters"):
        settings = model_config.get(key) or {}
        by_layer_type = [value for value in settings.values() if isinstance(value, dict)]
        for values in (settings, *by_layer_type):
            kind = values.get("rope_type") or values.get("type")
            if kind in ("dynamic", "longrope", "su"):
                return str(kind)
    return None


def _count_parameters(family: Family, values: Mapping[str, Any]) -> int:
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    inner = values["intermediate_size"]
    head_dim = values.get("head_dim") or hidden // heads
    query = heads * head_dim
    key = (values.get("num_key_value_heads") or heads) * head_dim

    def has(switch: bool | str) -> bool:
        return switch if isinstance(switch, bool) else bool(values.get(switch, False))

    attention = hidden * (query + 2 * key) + query * hidden
    attention += has(family.query_key_value_bias) * (query + 2 * key)
    attention += has(family.attention_output_bias) * hidden
    attention += len(family.query_key_norms) * head_dim
    mlp = 3 * hidden * inner + has(family.mlp_bias) * (2 * inner + hidden)
    layer = attention + mlp + len(family.layer_norms) * hidden
    tables = 1 if values.get("tie_word_embeddings", False) else 2
    vocabulary: int = values["vocab_size"] * hidden
    return int(values["num_hidden_layers"] * layer + tables * vocabulary + hidden)


def _list_windows(family: Family, values: Mapping[str, Any]) -> tuple[int | None, ...]:
    window = values.get("sliding_window")
    indices = range(values["num_hidden_layers"])
    if family.windows == "none" or window is None:
        return (None,) * len(indices)
    if family.windows == "all":
        return (window,) * len(indices)
    if family.windows == "upper" and not values.get("use_sliding_window", False):
        return (None,) * len(indices)
    kinds = values.get("layer_types")
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if family.windows == "upper":
        first = values["max_window_layers"]
        return tuple(window if index >= first else None for index in indices)
    period = values["sliding_window_pattern"]
    return tuple(window if (index + 1) % period else None for index in indices)


def _find_in_hub_cache(hub_id: str) -> Path | None:
    """Return the cached config.json of a hub id's main revision."""
    if hub_id.count("/") != 1:
        return None
    folder = Path(hub.HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}"
    reference = folder / "refs" / "main"
    if not reference.is_file():
        return None
    file = folder / "snapshots" / reference.read_text(encoding="utf-8").strip() / "config.json"
    return file if file.is_file() else None
