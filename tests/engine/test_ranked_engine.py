"""An engine's place among the ranks, before it has a model; degrees on meshes are in test_mesh."""

from __future__ import annotations

import pytest

from fsdpbench.engine.config.tracing import PerfTracerConfig
from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.ranked_engine import RankedEngine
from fsdpbench.errors import FsdpbenchError


@pytest.fixture
def engine():
    found = RankedEngine(TrainEngineConfig(path="tiny-llama"))
    yield found
    found.leave_groups()


@pytest.mark.parametrize("name", ["device", "meshes", "cpu_group", "data_parallel_rank"])
def test_nothing_is_known_before_the_groups(engine, name):
    with pytest.raises(FsdpbenchError, match="call create_process_group"):
        getattr(engine, name)


def test_a_lone_process_is_its_own_head(engine):
    engine.create_process_group()
    engine.create_process_group()  # again changes nothing
    assert engine.parallel_strategy.world_size == engine.data_parallel_world_size == 1
    assert engine.is_data_parallel_head
    assert engine.current_data_parallel_head == engine.data_parallel_rank == 0
    engine.leave_groups()
    with pytest.raises(FsdpbenchError, match="call create_process_group"):
        _ = engine.meshes


def test_a_ready_place_is_taken_as_it_is(engine):
    engine.create_process_group()
    guest = RankedEngine(TrainEngineConfig(path="tiny-llama"))
    guest.use_meshes(engine.device, engine.meshes, engine.tracer)
    assert guest.meshes is engine.meshes
    assert guest.config.backend == "fsdp:d1c1t1"
    guest.create_process_group()  # it has its groups
    with pytest.raises(FsdpbenchError, match="use_meshes"):
        guest.use_meshes(engine.device, engine.meshes, engine.tracer)


def test_tracing_that_is_off_writes_nothing(engine, tmp_path):
    assert engine.save_perf_tracer() is None
    engine.config_perf_tracer(PerfTracerConfig(enabled=True, output_dir=str(tmp_path)))
    engine.create_process_group()
    with engine.tracer.span("step", "other"):
        pass
    assert engine.save_perf_tracer() == tmp_path / "rank0.jsonl"
