"""Runs the engine's own build and training steps on a device that does not exist.

One rank of a world of any size, in a CPU process of its own: what an operator allocates is known
from its shapes. Nothing of the engine is written again here; the boundary is its public class, a
device type and ready meshes.
"""

from __future__ import annotations

import torch.distributed as dist

from fsdpbench.bench.predict.fake_mode import DeviceFakeMode
from fsdpbench.bench.predict.patches import apply_patches
from fsdpbench.bench.predict.simulated_device import (
    BACKEND,
    DEVICE_TYPE,
    claim_device,
    join_simulated_world,
)
from fsdpbench.bench.predict.trace import Trace, measure_phases
from fsdpbench.bench.predict.tracker import MemoryTracker
from fsdpbench.bench.predict.watched_engine import SCHEDULE, PhaseTracer, train_watched
from fsdpbench.bench.predict.workspaces import Architecture
from fsdpbench.bench.records import WorkloadSpec
from fsdpbench.engine.algorithms.sft import FSDPLMEngine
from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.device import Device
from fsdpbench.engine.parallel.mesh import build_meshes
from fsdpbench.engine.setup import settle_strategy
from fsdpbench.errors import ConfigError, Violation

KERNELS = ("varlen_attn", "eager")  # whose operators are seen on the simulated device as on CUDA
LOAD_NOTE = "load: weights are made from scratch; buffers of reading from files are not counted"
CHUNKS_NOTE = (
    "optimizer: adam_bf16 works in chunks here; its kernel, where Triton is installed, takes some "
    "200 MiB less in this phase"
)
AUTO_NOTE = "attention: auto is taken for torch's varlen_attn; flash-attn 4 may need other memory"


def simulate(
    config: TrainEngineConfig,
    workload: WorkloadSpec,
    *,
    world_size: int,
    rank: int = 0,
    architecture: Architecture | None = "sm90",
) -> Trace:
    """Run build and two training steps of one rank, in a process that does nothing else.

    One simulation may follow another. `architecture` decides the workspaces of CUDA kernels; None
    leaves them out. Raises ConfigError for what cannot be simulated, and what the engine raises for
    the rest.
    """
    check_supported(config, workload, world_size, rank)
    notes = list_differences(config)
    from_scratch = {"init_from_scratch": True, "fsdp.memory_efficient_load": False}
    config = config.with_changes(from_scratch)
    config = settle_strategy(config, None, world_size)
    claim_device()
    join_simulated_world(world_size, rank)
    tracker = MemoryTracker(DEVICE_TYPE, architecture)
    try:
        with apply_patches(tracker), DeviceFakeMode(), tracker:
            kernel = run_engine(config, workload, tracker)
    finally:
        dist.destroy_process_group()
    return Trace(
        rank=rank,
        world_size=world_size,
        attention_kernel=kernel,
        events=tracker.events,
        categories=tracker.categories,
        phases=measure_phases(tracker.events, tracker.categories, tracker.marks),
        notes=notes,
    )


def list_differences(config: TrainEngineConfig) -> list[str]:
    """Say what is simulated otherwise than it would run on a GPU."""
    in_chunks = config.optimizer is not None and config.optimizer.type == "adam_bf16"
    differences = {
        LOAD_NOTE: not config.init_from_scratch,
        CHUNKS_NOTE: in_chunks,
        AUTO_NOTE: config.attn_impl == "auto",
    }
    return [note for note, applies in differences.items() if applies]


def check_supported(
    config: TrainEngineConfig, workload: WorkloadSpec, world_size: int, rank: int
) -> None:
    """Raise ConfigError for what a simulation cannot run."""
    violations = []
    if config.optimizer is None:
        allowed = "a simulation runs training steps"
        violations.append(Violation("optimizer", "None", allowed, "set optimizer"))
    if workload.num_steps < 1:
        allowed = "must hold one training step at least"
        violations.append(Violation("workload.steps", str(workload.num_steps), allowed))
    if not 0 <= rank < world_size:
        violations.append(Violation("rank", str(rank), f"must be one of {world_size} ranks"))
    if violations:
        raise ConfigError(violations)


def run_engine(config: TrainEngineConfig, workload: WorkloadSpec, tracker: MemoryTracker) -> str:
    """Build an engine, train, and return the name of its attention kernel."""
    strategy = config.parallel_strategy
    assert strategy is not None  # settled by the caller
    device = Device(DEVICE_TYPE, 0)
    tracer = PhaseTracer(dist.get_rank(), device, tracker)
    engine = FSDPLMEngine(config)
    engine.use_meshes(device, build_meshes(strategy, DEVICE_TYPE, host_backend=BACKEND), tracer)
    engine.initialize(ft_spec=SCHEDULE)
    check_kernel(engine)
    train_watched(engine, workload, tracer)
    return engine.attention_kernel_name


def check_kernel(engine: FSDPLMEngine) -> None:
    """Refuse an attention kernel whose memory is another one here than on CUDA."""
    if engine.attention_kernel_name in KERNELS:
        return
    config = engine.config
    found = f"{config.attn_impl} with dtype {config.dtype}, which is {engine.attention_kernel_name}"
    allowed = f"the memory of {' and '.join(KERNELS)} can be simulated"
    raise ConfigError([Violation("attn_impl", found, allowed, "use flash_attention_2")])
