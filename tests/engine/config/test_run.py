"""Runs by kind: which sections each has."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpbench.engine.config.run import AlgorithmRun, SFTRun, build_run_config
from fsdpbench.errors import ConfigError

ENGINE = {"path": "tiny-qwen3", "optimizer": {}}
COMMON = {"actor": ENGINE, "dataset": {"path": "data.jsonl"}}
ROLLOUT = {"rollout": {"backend": "local:d1"}}


def paths_of(data):
    with pytest.raises(ConfigError) as caught:
        build_run_config(data)
    return {violation.where for violation in caught.value.violations}


def test_sft_has_length_and_engines():
    run = build_run_config({"kind": "sft", **COMMON, "trainer": {"total_train_epochs": 3}})
    assert isinstance(run, SFTRun)
    assert set(run.engines) == {"actor"}
    spec = run.finetune_spec(dataset_size=20)
    assert (spec.total_train_epochs, spec.train_batch_size, spec.total_train_steps) == (3, 8, 6)
    assert run.tracing.enabled is False
    assert run.dataset_file == Path("data.jsonl")


@pytest.mark.parametrize(
    "data",
    [
        {"kind": "ppo", **COMMON, **ROLLOUT, "critic": {**ENGINE, "is_critic": True}},
        {"kind": "grpo", **COMMON, **ROLLOUT, "ref": {"path": "tiny-qwen3"}, "reward": {"f": 1}},
        {"kind": "rw", **COMMON},
        {"kind": "dpo", **COMMON, "ref": {"path": "tiny-qwen3"}},
    ],
    ids=lambda data: data["kind"],
)
def test_algorithm_runs_have_their_shape(data):
    run = build_run_config(data)
    assert isinstance(run, AlgorithmRun)
    assert set(run.engines) == {name for name in ("actor", "critic", "ref") if name in data}


@pytest.mark.parametrize(
    ("data", "where"),
    [
        ({}, {"kind"}),
        ({"kind": None}, {"kind"}),
        ({"kind": ["sft"]}, {"kind"}),
        ({"kind": "sweep", "axes": {}}, {"kind"}),  # read by the layer above
        ({"kind": "sft"}, {"actor", "dataset"}),
        ({"kind": "sft", **COMMON, "critic": ENGINE}, {"critic"}),
        (
            {"kind": "sft", "actor": {"lr": 1}, "dataset": {"path": ""}},
            {"actor.lr", "actor.optimizer", "dataset.path"},
        ),
        ({"kind": "ppo", **COMMON}, {"critic", "rollout"}),
        ({"kind": "grpo", **COMMON, "critic": ENGINE}, {"critic", "rollout"}),
        ({"kind": "dpo", **COMMON, **ROLLOUT}, {"rollout"}),
        ({"kind": "rw", **COMMON, "workflow": {}}, {"workflow"}),
        (
            {"kind": "rw", **COMMON, "tracing": {"enabled": True, "output_dir": ""}},
            {"tracing.output_dir"},
        ),
        (
            {"kind": "ppo", "critic": {"dtype": "x"}, **ROLLOUT},
            {"actor", "dataset", "critic.dtype"},
        ),
    ],
)
def test_refusals(data, where):
    assert paths_of(data) == where
