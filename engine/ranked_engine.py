"""What an engine is before it has a model: its place among the ranks, its device and its tracer.

The boundary: nothing here knows of weights. Both last from `create_process_group` to
`leave_groups`; the tracer's settings may be given before.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from fsdpbench.engine.config.parallel import ParallelStrategy
from fsdpbench.engine.config.tracing import PerfTracerConfig
from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.device import Device, DeviceMemory
from fsdpbench.engine.launch import join_process_group, leave_process_group
from fsdpbench.engine.parallel.agreement import Agreement
from fsdpbench.engine.parallel.mesh import DeviceMeshes, build_meshes
from fsdpbench.engine.setup import check_same_strategy, settle_strategy
from fsdpbench.engine.tracing.tracer import Tracer, build_tracer
from fsdpbench.errors import FsdpbenchError


class RankedEngine:
    """One rank's groups, meshes, device and tracer."""

    def __init__(self, config: TrainEngineConfig) -> None:
        self.config = config
        self._meshes: DeviceMeshes | None = None
        self._device: Device | None = None  # set while we count as users of the default group
        self._trace_config = PerfTracerConfig()
        self.tracer = build_tracer(self._trace_config, 0, Device("cpu"))

    def create_process_group(self, parallel_strategy: ParallelStrategy | None = None) -> None:
        """Join the default process group and build the meshes. Collective over: the world.

        Without a strategy, `config.backend` decides; without that, all ranks are data-parallel.
        Raises TopologyError with every violated rule when degrees, model and world do not fit. A
        second call changes nothing, and refuses another strategy.
        """
        if self._meshes is not None:
            check_same_strategy(self._meshes.strategy, parallel_strategy)
            return
        if self._device is None:
            self._device, _ = join_process_group()
        device = self._device
        with Agreement("create_process_group", None, device.torch_device):
            self.config = settle_strategy(self.config, parallel_strategy, dist.get_world_size())
        strategy = self.config.parallel_strategy
        assert strategy is not None  # settled just now
        self._meshes = build_meshes(strategy, device.type)
        self.tracer = build_tracer(self._trace_config, dist.get_rank(), device)

    def use_meshes(self, device: Device, meshes: DeviceMeshes, tracer: Tracer) -> None:
        """Stand at a ready place among the ranks, in place of `create_process_group`. Local.

        The caller made the default process group and ends it; `leave_groups` gives the meshes back.
        """
        if self._meshes is not None:
            raise FsdpbenchError("use_meshes: this engine has its groups; call destroy() first")
        strategy = meshes.strategy
        self.config = settle_strategy(self.config, strategy, meshes.world_size)
        self._device, self._meshes, self.tracer = device, meshes, tracer

    def leave_groups(self) -> None:
        """Give memory and groups back; safe to call twice. Collective over: the world."""
        if self._device is not None:
            self._device.empty_cache()
        if self._meshes is not None:
            self._meshes.destroy()
            self._meshes = None
        if self._device is not None:
            leave_process_group()
            self._device = None

    @property
    def device(self) -> Device:
        """This rank's device; raises FsdpbenchError before `create_process_group`."""
        if self._device is None:
            raise FsdpbenchError("the engine has no device yet: call create_process_group() first")
        return self._device

    @property
    def meshes(self) -> DeviceMeshes:
        """The engine's meshes; raises FsdpbenchError before `create_process_group`."""
        if self._meshes is None:
            raise FsdpbenchError("the engine has no meshes yet: call create_process_group() first")
        return self._meshes

    @property
    def parallel_strategy(self) -> ParallelStrategy:
        """The degrees in force."""
        return self.meshes.strategy

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """Ranks that hold different data and the same tensor and context index."""
        return self.meshes.dp_group

    @property
    def data_parallel_rank(self) -> int:
        """This rank's data-parallel index."""
        return self.meshes.dp_rank

    @property
    def data_parallel_world_size(self) -> int:
        """Number of data-parallel indices."""
        return self.meshes.strategy.dp_size

    @property
    def context_and_model_parallel_group(self) -> dist.ProcessGroup:
        """Ranks that work on the same data: the context x tensor group."""
        return self.meshes.model_parallel_group

    @property
    def cpu_group(self) -> dist.ProcessGroup:
        """Gloo group over the engine's world, for host-side agreement."""
        return self.meshes.cpu_group

    @property
    def is_data_parallel_head(self) -> bool:
        """True on the first rank of each context x tensor group."""
        return self.meshes.is_data_parallel_head

    @property
    def current_data_parallel_head(self) -> int:
        """Global rank of the head of this rank's context x tensor group."""
        return self.meshes.data_parallel_head

    def get_device_stats(self) -> DeviceMemory:
        """Return the allocator's figures of this rank's device in bytes. Local."""
        return self.device.memory_stats()

    def config_perf_tracer(self, config: PerfTracerConfig) -> None:
        """Set up the tracing of this rank; takes effect with the next span. Local."""
        self._trace_config = config
        self.tracer.enabled, self.tracer.max_events = config.enabled, config.max_events

    def save_perf_tracer(self) -> Path | None:
        """Write the recorded spans to the tracer's folder; None when tracing is off. Local."""
        if not self.tracer.enabled:
            return None
        folder = Path(self._trace_config.output_dir)
        return self.tracer.save(folder / f"rank{self.tracer.rank}.jsonl")

    def memory_snapshot_start(self, max_entries: int = 100_000) -> None:
        """Begin recording allocator events; raises FsdpbenchError where the device has none."""
        self.device.memory_snapshot_start(max_entries)

    def memory_snapshot_stop(self, path: str | Path) -> None:
        """Write the recorded allocator events to `path` and stop recording."""
        self.device.memory_snapshot_stop(path)
