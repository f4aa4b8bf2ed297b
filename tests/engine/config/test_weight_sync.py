"""Rules of a weight update."""

from __future__ import annotations

import pytest

from fsdpbench.engine.config.weight_sync import WeightUpdateMeta
from fsdpbench.errors import ConfigError


def test_defaults():
    assert WeightUpdateMeta().model_dump() == {
        "type": "xccl",
        "path": None,
        "weight_chunked_mem_mb": 1024,
        "wire_dtype": "bfloat16",
        "send_adapters": False,
        "verify": False,
        "in_flight": "abort",
        "on_failure": "raise",
        "timeout_seconds": 300.0,
        "keep_versions": 2,
    }


def test_disk_needs_a_path():
    assert WeightUpdateMeta(type="disk", path="/shared").path == "/shared"
    with pytest.raises(ConfigError, match="path=None: is required when type is disk"):
        WeightUpdateMeta(type="disk")
    with pytest.raises(ConfigError, match="path=None: is required when on_failure is disk"):
        WeightUpdateMeta(on_failure="disk")


def test_awex_is_refused_with_its_reason():
    with pytest.raises(ValueError, match=r"Megatron actor with SGLang rollout.*xccl or disk"):
        WeightUpdateMeta(type="awex")
    with pytest.raises(ConfigError, match="must be 'xccl' or 'disk'"):
        WeightUpdateMeta(type="nccl")
