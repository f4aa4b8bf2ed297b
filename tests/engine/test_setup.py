"""Checks before anything is built: the torch floor and the degrees."""

from __future__ import annotations

import pytest

from fsdpbench.engine.config.parallel import ParallelStrategy
from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.setup import check_torch_version, settle_strategy
from fsdpbench.errors import ConfigError, TopologyError


@pytest.mark.parametrize("version", ["2.4.0", "2.10.1+cu128", "1.13.1"])
def test_an_old_torch_is_refused(version):
    with pytest.raises(ConfigError, match=r"must be 2\.11 or newer"):
        check_torch_version(version)


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.13.0+cpu", "2.14.0a0+git12"])
def test_a_new_torch_is_accepted(version):
    check_torch_version(version)


def test_degrees_come_from_the_argument_then_the_backend_then_the_world():
    config = TrainEngineConfig(path="tiny-llama", backend="fsdp:d2")
    strategy = ParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
    assert settle_strategy(config, strategy, 2).backend == "fsdp:d1c1t2"
    assert settle_strategy(config, None, 2).backend == "fsdp:d2c1t1"
    assert settle_strategy(TrainEngineConfig(path="tiny-llama"), None, 3).backend == "fsdp:d3c1t1"


def test_all_violations_come_at_once():
    config = TrainEngineConfig(path="tiny-llama", backend="fsdp:d3t5", is_critic=True)
    with pytest.raises(TopologyError) as caught:
        settle_strategy(config, None, 4)
    message = str(caught.value)
    for part in ("15", "world_size = 4", "num_attention_heads=8", "is_critic"):
        assert part in message


def test_pipeline_degrees_are_refused():
    config = TrainEngineConfig(path="tiny-llama")
    strategy = ParallelStrategy(pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="Megatron"):
        settle_strategy(config, strategy, 2)
