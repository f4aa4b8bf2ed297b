"""Defaults and rules of the `fsdp` section."""

from __future__ import annotations

import pytest

from fsdpbench.engine.config.fsdp import FSDPEngineConfig, FSDPWrapPolicy
from fsdpbench.errors import ConfigError


def test_defaults():
    assert FSDPEngineConfig().model_dump() == {
        "wrap_policy": None,
        "offload_params": False,
        "memory_efficient_load": False,
        "per_layer_optim_step": False,
        "optim_step_prefetch_layers": 1,
        "reshard_after_forward": True,
        "forward_prefetch_layers": 0,
        "backward_prefetch_layers": 0,
        "shard_vision_across_sp": False,
    }
    assert FSDPWrapPolicy().transformer_layer_cls_to_wrap is None


def test_prefetch_may_be_zero_but_not_negative():
    assert FSDPEngineConfig(optim_step_prefetch_layers=0).optim_step_prefetch_layers == 0
    with pytest.raises(ValueError, match="optim_step_prefetch_layers=-1: must be 0 or more"):
        FSDPEngineConfig(optim_step_prefetch_layers=-1)


def test_wrap_policy_takes_a_list_of_names():
    policy = FSDPWrapPolicy(transformer_layer_cls_to_wrap=["A", "B"])
    assert policy.transformer_layer_cls_to_wrap == ("A", "B")
    for wrong in ([], "A", [1]):
        with pytest.raises(ConfigError):
            FSDPWrapPolicy(transformer_layer_cls_to_wrap=wrong)
