"""From a space to points: each one either a complete trial specification or the reasons it is none.

Pure but for reading the model's config.json and the training text. A point's id is a hash of what
it computes (config, workload, world size, device, fault), so equal work has one id in every sweep.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from pydantic import ValidationError

from fsdpbench.bench import presets
from fsdpbench.bench.axes import Axis, iterate_grid, resolve_axes
from fsdpbench.bench.documents import load_workload
from fsdpbench.bench.faults import parse_fault
from fsdpbench.bench.records import DeviceName, TrialSpec, WorkloadSpec
from fsdpbench.bench.space import SweepSpace
from fsdpbench.bench.sync_plan import DEFAULT_SYNC_ROUNDS, SYNC_AXES, check_sync, drop_unused
from fsdpbench.engine.config.parallel import format_backend
from fsdpbench.engine.config.strict import set_path
from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.models.facts import read_model_facts
from fsdpbench.engine.topology import find_all_violations, resolve_strategy
from fsdpbench.errors import ConfigError, Violation

ID_LENGTH = 12
T = TypeVar("T")


@dataclass(frozen=True)
class Point:
    """One combination of axis values; `spec` is None exactly if there are violations."""

    id: str
    axes: Mapping[str, Any]
    config: Mapping[str, Any]
    workload: Mapping[str, Any]
    spec: TrialSpec | None
    violations: tuple[Violation, ...] = ()


@dataclass(frozen=True)
class SweepPlan:
    """All points of a space on one machine, in the order in which they run."""

    space: SweepSpace
    device: DeviceName
    world_size: int
    model: str
    points: tuple[Point, ...]
    num_duplicates: int = 0  # combinations that were the same work as an earlier one

    @property
    def num_valid(self) -> int:
        """Points that can be run."""
        return sum(point.spec is not None for point in self.points)


def plan_sweep(space: SweepSpace, num_gpus: int) -> SweepPlan:
    """Span the space's points on a machine; raises ConfigError for mistakes in the space itself."""
    device = _choose_device(space, num_gpus)
    world_size = space.world_size or (
        num_gpus if device == "cuda" else presets.DEFAULT_CPU_PROCESSES
    )
    if device == "cuda" and world_size > num_gpus:
        remedy = "lower world_size, or set device to cpu"
        allowed = f"must not exceed the {num_gpus} GPUs found"
        raise ConfigError([Violation("world_size", str(world_size), allowed, remedy)])
    model = space.model or str(space.base.get("path", "")) or presets.DEFAULT_MODELS[device]
    named = space.axes or presets.PRESETS[space.preset].plan_axes(device, world_size)
    axes = resolve_axes(named, world_size)
    planner = _Planner(space, device, world_size, model, num_gpus)
    points: dict[str, Point] = {}
    num_combinations = 0
    for combination in iterate_grid(axes):
        point = planner.plan_point(combination)
        points.setdefault(point.id, point)
        num_combinations += 1
    duplicates = num_combinations - len(points)
    return SweepPlan(space, device, world_size, model, tuple(points.values()), duplicates)


def _choose_device(space: SweepSpace, num_gpus: int) -> DeviceName:
    if space.device == "cuda" and num_gpus == 0:
        remedy = "use device cpu or auto"
        raise ConfigError([Violation("device", "'cuda'", "no GPU was found", remedy)])
    if space.device == "auto":
        return "cuda" if num_gpus else "cpu"
    return space.device


@dataclass(frozen=True)
class _Planner:
    """What all points of a sweep have in common."""

    space: SweepSpace
    device: DeviceName
    world_size: int
    model: str
    num_gpus: int
    texts: dict[tuple[str, int], tuple[Violation, ...]] = field(default_factory=dict)
    """What is wrong with the texts read so far, by workload and data-parallel size."""

    def plan_point(self, combination: tuple[tuple[Axis, Any], ...]) -> Point:
        """Build one point; whatever is wrong with it becomes its violations."""
        raw, raw_workload, fault = self._gather_values(combination)
        violations: list[Violation] = []
        config = _catch(violations, lambda: TrainEngineConfig(**raw))
        workload = _catch(violations, lambda: _build_workload(raw_workload))
        if fault is not None:
            _catch(violations, lambda: parse_fault(fault))
        world_size = self.world_size
        if config is not None:
            world_size = resolve_strategy(config, self.world_size).world_size
            violations += _catch(violations, lambda: self._check_config(config, world_size)) or []
            strategy = resolve_strategy(config, self.world_size)
            raw = {**config.model_dump(mode="json"), "backend": format_backend(strategy)}
            if workload is not None:
                violations += self._check_workload(workload, strategy.dp_size)
                violations += check_sync(
                    workload,
                    config,
                    device=self.device,
                    world_size=world_size,
                    num_gpus=self.num_gpus,
                )
        if workload is not None:
            raw_workload = drop_unused(workload)
        point_id = compute_id(raw, raw_workload, world_size, self.device, fault)
        axes = {axis.name: value for axis, value in combination}
        spec = None
        if workload is not None and not violations:
            spec = TrialSpec(
                id=point_id,
                axes=axes,
                config=raw,
                workload=workload,
                world_size=world_size,
                device=self.device,
                fault=fault,
                timeout_seconds=self.space.timeout_seconds
                or presets.DEFAULT_TIMEOUT_SECONDS[self.device],
                hang_seconds=self.space.hang_seconds or presets.DEFAULT_HANG_SECONDS[self.device],
            )
        return Point(point_id, axes, raw, raw_workload, spec, tuple(violations))

    def _gather_values(
        self, combination: tuple[tuple[Axis, Any], ...]
    ) -> tuple[dict[str, Any], dict[str, Any], str | None]:
        """Return config, workload and fault: axes over base over the defaults of the model."""
        chosen = {axis.path: value for axis, value in combination if axis.section == "config"}
        model = str(chosen.get("path", self.model))
        config = plain_copy(presets.plan_config_defaults(model, self.device))
        for path, value in {**self.space.base, "path": model, **chosen}.items():
            merge_at(config, path, plain_copy(value))
        workload = presets.plan_workload_defaults(_count_parameters(model), self.device)
        if any(axis.path in SYNC_AXES for axis, _ in combination):
            workload["sync_rounds"] = DEFAULT_SYNC_ROUNDS
        given = dict(self.space.workload)
        given |= {axis.path: value for axis, value in combination if axis.section == "workload"}
        if given.get("sequence_lengths") is not None:
            del workload["tokens_per_step"]  # the lengths decide it; a default must not contradict
        workload |= given
        faults = [value for axis, value in combination if axis.section == "fault"]
        fault = None if not faults or faults[0] in (None, "none") else str(faults[0])
        return config, workload, fault

    def _check_workload(self, workload: WorkloadSpec, dp_size: int) -> Sequence[Violation]:
        """Read the text that the point would train on; equal reading is done once."""
        key = (workload.model_dump_json(exclude={"seed"}), dp_size)
        if key not in self.texts:
            found: list[Violation] = []
            _catch(found, lambda: load_workload(workload, dp_size))
            self.texts[key] = tuple(found)
        return self.texts[key]

    def _check_config(self, config: TrainEngineConfig, world_size: int) -> list[Violation]:
        found = find_all_violations(config, world_size)
        if world_size > self.world_size:
            what = "GPUs" if self.device == "cuda" else "processes"
            found.append(
                Violation(
                    "backend",
                    repr(config.backend),
                    f"needs {world_size} {what} and this sweep has {self.world_size}",
                    "choose smaller degrees"
                    + ("" if self.device == "cuda" else f", or pass --world-size {world_size}"),
                )
            )
        if config.optimizer is None:
            found.append(
                Violation(
                    "optimizer", "None", "builds an engine for inference", "name an optimizer"
                )
            )
        return found


def compute_id(
    config: Mapping[str, Any],
    workload: Mapping[str, Any],
    world_size: int,
    device: DeviceName,
    fault: str | None,
) -> str:
    """Return the id of this work: the start of a hash of its canonical JSON."""
    content = [config, workload, world_size, device, fault]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]


def merge_at(data: dict[str, Any], path: str, value: Any) -> None:
    """Set a value at a dotted path; a mapping is merged into the mapping that stands there."""
    node: Any = data
    for name in path.split("."):
        node = node.get(name) if isinstance(node, dict) else None
    if isinstance(value, dict) and isinstance(node, dict):
        for name, item in value.items():
            merge_at(node, name, item)
    else:
        set_path(data, path, value)


def plain_copy(value: Any) -> Any:
    """Copy nested dicts and lists, so that no two points share one."""
    if isinstance(value, Mapping):
        return {key: plain_copy(item) for key, item in value.items()}
    return [plain_copy(item) for item in value] if isinstance(value, list) else value


def _build_workload(raw: Mapping[str, Any]) -> WorkloadSpec:
    try:
        return WorkloadSpec(**raw)
    except ValidationError as error:
        violations = [
            Violation(
                ".".join(["workload", *(str(part) for part in line["loc"])]),
                repr(line["input"]),
                line["msg"],
                f"fields: {', '.join(WorkloadSpec.model_fields)}"
                if "extra" in line["type"]
                else "",
            )
            for line in error.errors(include_url=False)
        ]
        raise ConfigError(violations) from None


def _catch(violations: list[Violation], build: Callable[[], T]) -> T | None:
    try:
        return build()
    except ConfigError as error:
        violations.extend(error.violations)
    except RecursionError:
        violations.append(Violation("", "", "a file or a value is nested too deeply"))
    return None


@cache
def _count_parameters(model: str) -> int | None:
    try:
        return read_model_facts(model).num_parameters
    except (ConfigError, RecursionError):
        return None
