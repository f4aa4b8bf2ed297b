"""Memory of a real run on the CPU, watched as the simulation watches its own."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

from fsdpbench.bench.predict.patches import PATCHES
from fsdpbench.bench.predict.trace import measure_phases
from fsdpbench.bench.predict.tracker import MemoryTracker
from fsdpbench.bench.predict.watched_engine import SCHEDULE, PhaseTracer, train_watched
from fsdpbench.bench.records import WorkloadSpec
from fsdpbench.engine.algorithms.sft import FSDPLMEngine
from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.device import Device

WATCHING = ("torch.UntypedStorage.resize_", "ShardingPropagator._propagate_tensor_meta_non_cached")


def measure(
    rank: int, world_size: int, *, config: dict[str, Any], workload: dict[str, Any]
) -> list[tuple[int, str, int]]:
    """Return step, phase and peak bytes of each phase of this rank."""
    tracker = MemoryTracker("cpu", None)
    engine = FSDPLMEngine(TrainEngineConfig(**config))
    engine.create_process_group()
    engine.tracer = tracer = PhaseTracer(dist.get_rank(), Device("cpu"), tracker)
    try:
        with ExitStack() as stack:
            for patch in PATCHES:
                if patch.target in WATCHING:
                    stack.enter_context(patch.apply(tracker))
            stack.enter_context(tracker)
            engine.initialize(ft_spec=SCHEDULE)
            train_watched(engine, WorkloadSpec(**workload), tracer)
            tracer.engine = None
    finally:
        engine.destroy()
    phases = measure_phases(tracker.events, tracker.categories, tracker.marks)
    return [(phase.step, phase.phase, phase.peak_bytes) for phase in phases]
