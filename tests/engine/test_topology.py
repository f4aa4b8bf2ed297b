"""Rules over configuration, world, model and machine, against brute force where there is one."""

from __future__ import annotations

import itertools

import pytest

from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.models.facts import build_model_facts, read_model_facts
from fsdpbench.engine.models.presets import PRESETS
from fsdpbench.engine.topology import (
    find_all_violations,
    find_violations,
    resolve_strategy,
)


def config_of(backend="", path="tiny-qwen3", **values):
    return TrainEngineConfig(backend=backend, path=path, **values)


def paths_of(violations):
    return [violation.where for violation in violations]


def test_strategy_is_the_backend_or_pure_data_parallel():
    assert resolve_strategy(config_of(), 6).dp_size == 6
    assert resolve_strategy(config_of("fsdp:d2t2"), 6).world_size == 4


@pytest.mark.parametrize(
    "backend",
    ["", "fsdp:d8", "fsdp:d4t2", "fsdp:d4c2", "fsdp:d2c2t2", "fsdp:c8", "fsdp:c4t2", "fsdp:d2c4"],
)
def test_meshes_of_eight_ranks_for_the_tiny_models(backend):
    for path in ("tiny-qwen3", "tiny-llama"):
        assert find_all_violations(config_of(backend, path), 8, num_devices=8) == []


@pytest.mark.parametrize(
    ("backend", "world_size", "remedy"),
    [
        ("fsdp:d2t2", 8, "use d4 or start 4 ranks"),
        ("fsdp:d2c1t2", 2, "use d1 or start 4 ranks"),
        ("fsdp:d1t2", 3, "start 2 ranks or change the degrees"),
    ],
)
def test_the_product_names_every_number(backend, world_size, remedy):
    (violation,) = find_violations(config_of(backend), world_size, None)
    strategy = resolve_strategy(config_of(backend), world_size)
    text = str(violation)
    numbers = (strategy.dp_size, strategy.cp_size, strategy.tp_size)
    assert "dp * cp * tp = {} * {} * {} = ".format(*numbers) in text
    assert f"world_size = {world_size}" in text
    assert violation.remedy == remedy


def test_devices_must_suffice():
    (violation,) = find_violations(config_of(), 4, None, num_devices=2)
    assert violation.where == "world_size"
    assert find_violations(config_of(), 4, None, num_devices=4) == []


SIZES = [1, 2, 3, 4, 5, 6, 8, 9, 12, 16]


@pytest.mark.parametrize(("heads", "kv"), [(8, 2), (9, 3), (8, 8), (12, 4), (16, 1), (64, 8)])
def test_heads_against_counting_them(heads, kv):
    """Deal heads out to ranks one by one and compare the verdict with the rules'."""
    content = {
        **PRESETS["tiny-llama"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": 720 * 8,
        "intermediate_size": 720 * 8,
    }
    facts = build_model_facts(content)
    for tp, cp in itertools.product(SIZES, SIZES):
        found = find_violations(config_of(f"fsdp:d1c{cp}t{tp}"), cp * tp, facts)
        assert (found == []) == deal_heads(heads, kv, tp, cp), (tp, cp, found)


def deal_heads(heads, kv, tp, cp):
    """Tell whether each rank gets equally many whole heads and the key/value heads they need."""
    if heads % tp or kv % tp:
        return False
    local_heads, local_kv = heads // tp, kv // tp
    if local_heads % cp:
        return False
    copies = max(1, cp // local_kv)  # key/value heads are repeated until every rank has one
    if (local_kv * copies) % cp:
        return False
    per_rank = local_heads // cp
    kv_per_rank = local_kv * copies // cp
    group = local_heads // local_kv
    for rank in range(cp):
        wanted = [(rank * per_rank + head) // group for head in range(per_rank)]
        held = [(rank * kv_per_rank + head) // copies for head in range(kv_per_rank)]
        if sorted(set(wanted)) != held:
            return False
    return True


def test_every_dimension_is_named_at_once():
    found = find_all_violations(config_of("fsdp:t3"), 3)
    assert paths_of(found) == ["tensor_parallel_size"] * 4
    text = "\n".join(map(str, found))
    for name in (
        "num_attention_heads=8",
        "num_key_value_heads=2",
        "intermediate_size=256",
        "vocab_size=512",
    ):
        assert name in text
    assert {violation.remedy for violation in found} == {"use 1 or 2"}


def test_more_ranks_than_key_value_heads_are_refused():
    found = find_all_violations(config_of("fsdp:t4"), 4)
    assert [v.allowed for v in found] == ["must divide num_key_value_heads=2 of the model"]


def test_smollm2_refuses_two_and_takes_three():
    assert find_all_violations(config_of("fsdp:t3", "smollm2-135m"), 3) == []
    assert find_all_violations(config_of("fsdp:c3", "smollm2-135m"), 3) == []
    found = find_all_violations(config_of("fsdp:t2", "smollm2-135m"), 2)
    assert {v.remedy for v in found} == {"use 1 or 3"}
    assert paths_of(find_all_violations(config_of("fsdp:c2", "smollm2-135m"), 2)) == [
        "context_parallel_size",
        "context_parallel_size",
    ]


def test_an_uneven_vocabulary_is_refused_under_tensor_parallel_only():
    facts = build_model_facts({**PRESETS["tiny-llama"], "vocab_size": 511})
    assert find_violations(config_of("fsdp:d2"), 2, facts) == []
    (violation,) = find_violations(config_of("fsdp:t2"), 2, facts)
    assert "vocab_size=511" in violation.allowed


@pytest.mark.parametrize(
    ("names", "wrong"),
    [
        (["Qwen3DecoderLayer"], []),
        (["Qwen3DecoderLayer", "Qwen3MLP"], []),
        (["LlamaDecoderLayer"], ["'LlamaDecoderLayer'"]),
        (["Qwen3MLP", "X", "Y"], ["'X'", "'Y'"]),
    ],
)
def test_wrapped_classes_exist_in_the_model(names, wrong):
    config = config_of(fsdp={"wrap_policy": {"transformer_layer_cls_to_wrap": names}})
    found = find_all_violations(config, 1)
    assert [violation.found for violation in found] == wrong
    assert all("Qwen3DecoderLayer" in violation.remedy for violation in found)


@pytest.mark.parametrize(
    ("names", "policy", "wrong"),
    [
        (["Qwen3DecoderLayer"], "keep_both", []),
        (["Qwen3MLP"], "full", []),
        (["Qwen3DecoderLayer", "Qwen3MLP"], "keep_matmul", ["'keep_matmul'"]),
        (["Qwen3Attention"], "keep_attention", ["'keep_attention'"]),
    ],
)
def test_units_within_a_layer_exclude_kept_outputs(names, policy, wrong):
    config = config_of(
        gradient_checkpointing=True,
        gradient_checkpointing_policy=policy,
        fsdp={"wrap_policy": {"transformer_layer_cls_to_wrap": names}},
    )
    found = find_all_violations(config, 1)
    assert [violation.found for violation in found] == wrong
    assert all("wrap Qwen3DecoderLayer" in violation.remedy for violation in found)
    config = config.with_changes({"gradient_checkpointing": False})
    assert find_all_violations(config, 1) == []


def test_models_that_no_kernel_here_serves():
    gemma = {**PRESETS["tiny-llama"], "model_type": "gemma3_text"}
    facts = build_model_facts({**gemma, "use_bidirectional_attention": True})
    assert "both directions" in find_violations(config_of(), 1, facts)[0].allowed
    facts = build_model_facts({**gemma, "attn_logit_softcapping": 50.0})
    assert "soft-caps" in find_violations(config_of(), 1, facts)[0].allowed
    facts = build_model_facts({**gemma, "final_logit_softcapping": 30.0})
    assert find_violations(config_of(), 1, facts) == []


def test_everything_wrong_is_listed_together():
    config = config_of(
        "fsdp:d3t3",
        use_lora=True,
        target_modules=["lm_head"],
        is_critic=True,
        fsdp={
            "wrap_policy": {"transformer_layer_cls_to_wrap": ["X"]},
        },
        optimizer={},
    )
    assert sorted(set(paths_of(find_all_violations(config, 8, num_devices=4)))) == [
        "backend",
        "fsdp.wrap_policy.transformer_layer_cls_to_wrap",
        "is_critic",
        "target_modules",
        "tensor_parallel_size",
        "world_size",
    ]


def test_an_unreadable_model_stands_beside_the_other_violations(tmp_path):
    found = find_all_violations(config_of("fsdp:d3", str(tmp_path)), 2)
    assert paths_of(found) == ["backend", "path"]
    (tmp_path / "config.json").write_text('{"model_type": "mixtral", "num_local_experts": 8}')
    found = find_all_violations(config_of("", str(tmp_path)), 2)
    assert "Archon-like" in found[0].allowed


@pytest.mark.parametrize("name", PRESETS)
def test_presets_run_on_one_rank(name):
    assert find_violations(config_of("", name), 1, read_model_facts(name)) == []
