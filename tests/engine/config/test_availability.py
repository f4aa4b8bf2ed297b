"""Switches without machinery are named; switches without effect are named too."""

from __future__ import annotations

import pytest

from fsdpbench.engine.config.availability import UNAVAILABLE, find_ignored, find_unavailable
from fsdpbench.engine.config.run import build_run_config
from fsdpbench.engine.config.train import TrainEngineConfig

ENGINE = {"path": "tiny-qwen3", "optimizer": {}}


@pytest.mark.parametrize("path", UNAVAILABLE)
def test_each_switch_is_named(path):
    config = TrainEngineConfig(**ENGINE).with_changes({path: True})
    (violation,) = find_unavailable(config)
    assert violation.where == path
    assert "not available yet" in str(violation)
    assert find_unavailable(TrainEngineConfig(**ENGINE)) == []


@pytest.mark.parametrize("kind", ["rw", "dpo"])
def test_kinds_are_named_beside_their_engines(kind):
    run = build_run_config(
        {"kind": kind, "actor": {**ENGINE, "is_critic": True}, "dataset": {"path": "x"}}
    )
    assert [v.where for v in find_unavailable(run)] == ["kind", "actor.is_critic"]


def test_sft_is_available():
    run = build_run_config({"kind": "sft", "actor": ENGINE, "dataset": {"path": "x"}})
    assert find_unavailable(run) == []


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({}, []),
        ({"weight_update_mode": "disk"}, []),
        ({"lora_rank": 8}, ["lora_rank"]),
        ({"lora_rank": 8, "use_lora": True}, []),
        ({"lora_rank": 32}, []),
        ({"grad_reduce_dtype": "bfloat16"}, ["grad_reduce_dtype"]),
        ({"grad_reduce_dtype": "bfloat16", "optimizer": {}}, []),
        ({"gradient_checkpointing_policy": "keep_matmul"}, ["gradient_checkpointing_policy"]),
        (
            {"gradient_checkpointing_policy": "keep_matmul", "gradient_checkpointing": True},
            [],
        ),
        ({"target_modules": ["a"]}, ["target_modules"]),
        ({"fsdp": {"optim_step_prefetch_layers": 2}}, ["fsdp.optim_step_prefetch_layers"]),
        ({"fsdp": {"shard_vision_across_sp": True}}, ["fsdp.shard_vision_across_sp"]),
        ({"fsdp": {"shard_vision_across_sp": True}, "backend": "fsdp:c2"}, []),
        ({"optimizer": {"type": "sgd", "beta1": 0.5}}, ["optimizer.beta1"]),
        ({"optimizer": {"type": "adam", "beta1": 0.5}}, []),
        ({"optimizer": {"min_lr_ratio": 0.1}}, ["optimizer.min_lr_ratio"]),
        ({"optimizer": {"min_lr_ratio": 0.1, "lr_scheduler_type": "cosine"}}, []),
    ],
)
def test_what_has_no_effect_is_named(values, where):
    assert [v.where for v in find_ignored(TrainEngineConfig(**values))] == where
