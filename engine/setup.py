"""Build phases of an engine in order: from a configuration and ready meshes to `EngineParts`.

`build_parts` returns a complete frozen record; no half-built engine exists. It is told a device
type and meshes and knows nothing else about where it runs, so the same code builds on CUDA, on the
CPU and on a simulated device.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fsdpbench.engine.config.availability import find_ignored
from fsdpbench.engine.config.parallel import format_backend
from fsdpbench.engine.device import Device
from fsdpbench.engine.models.heads import PolicyModel
from fsdpbench.engine.models.load import build_meta_model, resolve_path
from fsdpbench.engine.offload import EngineMemory
from fsdpbench.engine.optim.build import build_optimizer
from fsdpbench.engine.optim.schedule import build_scheduler
from fsdpbench.engine.optim.sharded import ShardedOptimizer
from fsdpbench.engine.optim.stream_plan import find_blocks
from fsdpbench.engine.parallel.adapter_values import fill_adapters
from fsdpbench.engine.parallel.agreement import Agreement
from fsdpbench.engine.parallel.materialize import materialize_model
from fsdpbench.engine.parallel.mesh import DeviceMeshes
from fsdpbench.engine.parallel.parallelize import parallelize_model
from fsdpbench.engine.parallel.seeded_weights import seed_of
from fsdpbench.engine.topology import find_all_violations, resolve_strategy
from fsdpbench.engine.tracing.tracer import Tracer
from fsdpbench.errors import ConfigError, TopologyError, Violation
from fsdpbench.log import get_logger, warn_once

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.fsdp import FSDPModule
    from torch.optim.lr_scheduler import LRScheduler

    from fsdpbench.engine.config.parallel import ParallelStrategy
    from fsdpbench.engine.config.train import FinetuneSpec, TrainEngineConfig

TORCH_FLOOR = (2, 11)
logger = get_logger(__name__)


@dataclass(frozen=True)
class EngineParts:
    """Everything a step needs; made once by `build_parts`."""

    config: TrainEngineConfig
    device: Device
    meshes: DeviceMeshes
    model: PolicyModel
    optimizer: ShardedOptimizer | None  # None: inference only
    scheduler: LRScheduler | None
    tracer: Tracer
    units: tuple[FSDPModule, ...]  # what FSDP2 gathers together, the root last
    memory: EngineMemory
    source: Path  # folder that the configuration and the tokenizer came from

    def close(self) -> None:
        """Unlock the host memory of optimizer and offload. The parts are of no use afterwards."""
        try:
            self.memory.close()
        finally:
            if self.optimizer is not None:
                self.optimizer.close()


def check_torch_version(version: str = torch.__version__) -> None:
    """Refuse a torch below the floor: packed attention and DTensor norms need it."""
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if found < TORCH_FLOOR:
        floor = ".".join(map(str, TORCH_FLOOR))
        violation = Violation("torch", version, f"must be {floor} or newer", "upgrade torch")
        raise ConfigError([violation])


def settle_strategy(
    config: TrainEngineConfig, strategy: ParallelStrategy | None, world_size: int
) -> TrainEngineConfig:
    """Return the configuration with the degrees in force written into `backend`, fully checked.

    Raises TopologyError with every violated rule over configuration, model and world. Local: reads
    at most the model's config file.
    """
    check_torch_version()
    if strategy is None:
        strategy = resolve_strategy(config, world_size)
    settled = config.with_changes({"backend": format_backend(strategy)})
    violations = find_all_violations(settled, world_size)
    if violations:
        raise TopologyError(violations)
    return settled


def check_same_strategy(in_force: ParallelStrategy, requested: ParallelStrategy | None) -> None:
    """Refuse degrees that differ from those an engine has its groups for; None asks for nothing."""
    if requested is None or format_backend(requested) == format_backend(in_force):
        return
    found = format_backend(requested)
    allowed = f"the engine has its groups already, for {format_backend(in_force)}"
    raise TopologyError(
        [Violation("parallel_strategy", found, allowed, "call destroy() first, or pass none")]
    )


def build_parts(
    config: TrainEngineConfig,
    finetune: FinetuneSpec,
    device: Device,
    meshes: DeviceMeshes,
    tracer: Tracer,
) -> EngineParts:
    """Build model, shards, weights and optimizer. Collective over: the world.

    With dropout, torch's generators are seeded anew, and differently on each rank: tensor and
    context ranks drop weights of different heads.

    Each phase ends in an agreement of all ranks, so that none waits for a peer that gave up.
    """
    if meshes.rank == 0:
        for violation in find_ignored(config):
            warn_once(logger, str(violation))
    with Agreement("initialize", meshes.cpu_group):
        with tracer.span("build", "io"):
            source = resolve_path(config)
            model = build_meta_model(config, source)
        with tracer.span("parallelize", "compute"):
            units = parallelize_model(model, config, meshes, device)
    with tracer.span("load", "io"):
        load_weights(model, config, source, meshes, device)
    with Agreement("initialize", meshes.cpu_group):
        if model.attention_dropout > 0:
            torch.manual_seed(seed_of(config.seed, "dropout", meshes.rank))
        optimizer = scheduler = None
        if config.optimizer is not None:
            optimizer = build_engine_optimizer(model, config, device)
            scheduler = build_scheduler(optimizer, config.optimizer, finetune.total_train_steps)
    return EngineParts(
        config=config,
        device=device,
        meshes=meshes,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        tracer=tracer,
        units=units,
        memory=EngineMemory(model, optimizer, device, meshes.cpu_group),
        source=source,
    )


def load_weights(
    model: PolicyModel,
    config: TrainEngineConfig,
    source: Path,
    meshes: DeviceMeshes,
    device: Device,
) -> None:
    """Give a parallelized model its weights and adapters. Collective over: the world."""
    started = time.perf_counter()
    # a broadcast agrees for itself, in the middle of its own collectives
    alone = not config.broadcasts_weights
    with Agreement("initialize", meshes.cpu_group) if alone else nullcontext():
        materialize_model(model, config, source, meshes, device)
    with Agreement("initialize", meshes.cpu_group):
        fill_adapters(model, config, device)
    device.synchronize()
    logger.info("weights in place after %.1f s", time.perf_counter() - started)


def build_engine_optimizer(
    model: PolicyModel, config: TrainEngineConfig, device: Device
) -> ShardedOptimizer:
    """Build the optimizer over what is trained, streamed by unit if the configuration says so."""
    assert config.optimizer is not None  # the caller trains
    streamed = config.fsdp.per_layer_optim_step
    return build_optimizer(
        model.named_trainable_parameters(),
        config.optimizer,
        config.optimizer_dtype,
        blocks=find_blocks(model) if streamed else None,
        device=device,
        prefetch_layers=config.fsdp.optim_step_prefetch_layers,
    )
