"""The table of names, and how its rows are chosen."""

from __future__ import annotations

import pytest

from fsdpbench.engine.weight_sync.names import ANY_FAMILY, SAME, NameRule, name_for
from fsdpbench.errors import WeightSyncError

NAMES = (
    "model.layers.0.self_attn.q_proj.weight",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
)


@pytest.mark.parametrize("dialect", ["local", "vllm", "sglang"])
@pytest.mark.parametrize("name", NAMES)
def test_dense_text_families_and_adapters_keep_their_names(dialect, name):
    assert name_for(dialect, name, "qwen3") == name


def test_a_family_of_its_own_comes_first_and_its_first_rule_wins():
    table = {
        ("vllm", ANY_FAMILY): SAME,
        ("vllm", "vision"): (
            NameRule(r"model\.visual\.", "visual."),
            NameRule(r"model\.", "language_model.model."),
        ),
    }
    assert name_for("vllm", "model.visual.w", "vision", table) == "visual.w"
    assert (
        name_for("vllm", "model.layers.0.w", "vision", table) == "language_model.model.layers.0.w"
    )
    assert name_for("vllm", "lm_head.model.w", "vision", table) == "lm_head.model.w"
    assert name_for("vllm", "model.visual.w", "text", table) == "model.visual.w"


def test_an_unknown_dialect_is_refused():
    with pytest.raises(WeightSyncError, match="known are local, sglang, vllm"):
        name_for("other", "w")
