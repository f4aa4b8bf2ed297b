"""The static check: a configuration against its own rules, the world, the model and this machine.

Pure but for reading the file, the model's config.json and the machine's facts; no torch. All
violations come out at once. Memory is bounded from below only: a check never says "will fit".
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdpbench.bench.space import load_space
from fsdpbench.bench.sweep import SweepPlan, plan_sweep
from fsdpbench.diagnose.checks.machine import Machine
from fsdpbench.diagnose.findings import CheckReport, Finding, Severity
from fsdpbench.engine.config.availability import find_ignored, find_unavailable
from fsdpbench.engine.config.load import build_config, load_config, load_yaml
from fsdpbench.engine.config.run import RunConfig
from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.models.adapter_targets import count_adapter_weights
from fsdpbench.engine.models.facts import ModelFacts, read_model_facts
from fsdpbench.engine.topology import find_violations, resolve_strategy
from fsdpbench.errors import ConfigError, Violation, ViolationError, list_names
from fsdpbench.units import format_bytes

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_POINTS = 5


class UnreadableConfigError(ViolationError):
    """The file cannot be read as YAML at all."""


def check_config(path: Path, world_size: int | None, machine: Machine) -> CheckReport:
    """Check a file; raises UnreadableConfigError where there is nothing to check."""
    try:
        data = load_yaml(path)
    except ConfigError as error:
        raise UnreadableConfigError(error.violations) from None
    if data.get("kind") == "sweep":
        return _check_sweep(path, machine)
    kind = str(data.get("kind", "engine"))
    try:
        config = load_config(path)
    except ConfigError as error:
        findings = [Finding.of(violation) for violation in error.violations]
        rest = _without(data, error.violations)
        report = CheckReport(str(path), kind, world_size, tuple(findings))
        if rest is None:
            return report
        more = _check_engines(path, kind, rest, world_size, machine)
        return replace(more, findings=(*report.findings, *more.findings))
    return _check_engines(path, kind, config, world_size, machine)


def _without(
    data: Mapping[str, Any], violations: Sequence[Violation]
) -> TrainEngineConfig | RunConfig | None:
    """Build what is left when the fields that broke a rule are taken out; None if that fails too.

    So the rules on the world, the model and the machine speak at once with those of the fields.
    """
    rest = copy.deepcopy(dict(data))
    for violation in violations:
        *sections, name = violation.where.split(".")
        section: Any = rest
        for part in sections:
            section = section.get(part) if isinstance(section, dict) else None
        if not isinstance(section, dict) or name not in section:
            return None
        del section[name]
    try:
        return build_config(rest)
    except ConfigError:
        return None


def _check_engines(
    path: Path,
    kind: str,
    config: TrainEngineConfig | RunConfig,
    world_size: int | None,
    machine: Machine,
) -> CheckReport:
    engines = config.engines if isinstance(config, RunConfig) else {"": config}
    findings: list[Finding] = []
    facts: dict[str, Any] = {"machine": _describe_machine(machine)}
    if isinstance(config, RunConfig):
        findings += [Finding.of(violation) for violation in find_unavailable(config)]
        findings += list(_check_dataset(config, path))
    worlds: dict[str, int] = {}
    for name, engine in engines.items():
        world = world_size or _guess_world(engine, machine)
        worlds[name or "engine"] = world
        model, problems = _read_model(engine)
        devices = machine.num_gpus if world_size is None and machine.num_gpus else None
        problems += find_violations(engine, world, model, devices)
        problems += list(_check_memory(engine, world, model, machine, world_size is None))
        findings += [Finding.of(_inside(name, violation)) for violation in problems]
        findings += [_note(_inside(name, violation)) for violation in find_ignored(engine)]
        findings += list(_note_cores(world, machine, world_size is None))
        facts[name or "engine"] = _describe_engine(engine, world, model)
    shown = world_size or max(worlds.values(), default=None)
    return CheckReport(str(path), kind, shown, tuple(dict.fromkeys(findings)), facts)


def _check_sweep(path: Path, machine: Machine) -> CheckReport:
    try:
        plan = plan_sweep(load_space(path), machine.num_gpus)
    except ConfigError as error:
        findings = tuple(Finding.of(violation) for violation in error.violations)
        return CheckReport(str(path), "sweep", None, findings)
    facts = {
        "machine": _describe_machine(machine),
        "points": len(plan.points),
        "valid_points": plan.num_valid,
        "model": plan.model,
    }
    return CheckReport(str(path), "sweep", plan.world_size, tuple(_sweep_findings(plan)), facts)


def _sweep_findings(plan: SweepPlan) -> Iterator[Finding]:
    refused = [point for point in plan.points if point.spec is None]
    severity = Severity.NOTE if plan.num_valid else Severity.PROBLEM
    for point in refused[:MAX_POINTS]:
        axes = ", ".join(f"{name}={value}" for name, value in point.axes.items())
        why = "; ".join(str(violation) for violation in point.violations)
        yield Finding(severity, f"point {axes}", "refused", why, "the sweep records it as invalid")
    if len(refused) > MAX_POINTS:
        rest = len(refused) - MAX_POINTS
        yield Finding(severity, "axes", f"{rest} more points", "refused", "narrow the axes")


def _read_model(engine: TrainEngineConfig) -> tuple[ModelFacts | None, list[Violation]]:
    try:
        return read_model_facts(engine.path), []
    except ConfigError as error:
        return None, list(error.violations)
    except RecursionError:
        allowed = "has a config.json that is nested too deeply"
        return None, [Violation("path", repr(engine.path), allowed)]


def _guess_world(engine: TrainEngineConfig, machine: Machine) -> int:
    strategy = engine.parallel_strategy
    return strategy.world_size if strategy is not None else machine.num_gpus or 1


def _inside(section: str, violation: Violation) -> Violation:
    if not section:
        return violation
    where = f"{section}.{violation.where}"
    return Violation(where, violation.found, violation.allowed, violation.remedy)


def _note(violation: Violation) -> Finding:
    return Finding.of(violation, Severity.NOTE)


def _check_dataset(config: RunConfig, path: Path) -> Iterator[Finding]:
    dataset = getattr(config, "dataset", None)
    file = getattr(dataset, "path", None)
    if not isinstance(file, str):
        return
    if not file.strip() or not (Path(file).exists() or (path.parent / file).exists()):
        allowed = "must be an existing file"
        yield Finding(Severity.PROBLEM, "dataset.path", repr(file), allowed, "correct the path")


@dataclass(frozen=True)
class ResidentBytes:
    """What training keeps over all ranks, activations left out, and where it rests."""

    on_devices: int
    on_hosts: int

    @property
    def total(self) -> int:
        """Bytes in all, as on a machine whose ranks compute on the CPU."""
        return self.on_devices + self.on_hosts


def count_resident_bytes(engine: TrainEngineConfig, model: ModelFacts) -> ResidentBytes:
    """Count weights, gradients and optimizer states."""
    trained, frozen = model.num_parameters, 0
    if engine.use_lora:
        frozen = trained
        trained = count_adapter_weights(engine.target_modules, engine.lora_rank, model)
    size = BYTES[engine.optimizer_dtype]
    weights = trained * size + frozen * BYTES[engine.dtype]
    gradients = states = 0
    if engine.optimizer is not None:
        gradients = trained * size
        # bf16 moments, and a compensation where the weights are bf16 too
        kahan = 6 if engine.optimizer_dtype == "bfloat16" else 4
        states = trained * {"adam": 2 * size, "adam_bf16": kahan, "sgd": 0}[engine.optimizer.type]
    if engine.fsdp.offload_params:
        return ResidentBytes(0, weights + gradients + states)
    if engine.fsdp.per_layer_optim_step:
        return ResidentBytes(weights + gradients, states)
    return ResidentBytes(weights + gradients + states, 0)


def _check_memory(
    engine: TrainEngineConfig, world: int, model: ModelFacts | None, machine: Machine, here: bool
) -> Iterator[Violation]:
    """Compare what must be resident, activations left out, with what this machine has."""
    if model is None or not here:
        return
    resident = count_resident_bytes(engine, model)
    text = f"{format_bytes(resident.total)} of weights, gradients and optimizer states"
    on_hosts = resident.total if machine.gpu_bytes is None else resident.on_hosts
    if on_hosts > machine.memory_bytes:
        option = _find_host_option(engine)
        allowed = (
            f"{format_bytes(on_hosts)} of {text} exceed the host memory of "
            f"{format_bytes(machine.memory_bytes)}"
        )
        found = "True" if option else repr(engine.path)
        yield Violation(option or "path", found, allowed, "use more machines or a smaller model")
    if machine.gpu_bytes is not None and resident.on_devices / world > machine.gpu_bytes:
        allowed = (
            f"{text} over {world} ranks leave {format_bytes(resident.on_devices / world)} on each "
            f"device, more than the {format_bytes(machine.gpu_bytes)} of {machine.gpu_name}"
        )
        remedy = "set fsdp.offload_params: true, or use more ranks"
        if engine.optimizer is not None and not engine.fsdp.per_layer_optim_step:
            remedy = f"set fsdp.per_layer_optim_step: true (adam), {remedy.removeprefix('set ')}"
        yield Violation("path", repr(engine.path), allowed, remedy)


def _find_host_option(engine: TrainEngineConfig) -> str | None:
    """Name the option that puts memory on the host; None where there is none."""
    for name in ("offload_params", "per_layer_optim_step"):
        if getattr(engine.fsdp, name):
            return f"fsdp.{name}"
    return None


def _note_cores(world: int, machine: Machine, here: bool) -> Iterator[Finding]:
    if here and machine.num_gpus == 0 and world > machine.num_cores:
        found = f"{world} processes on {machine.num_cores} cores"
        yield Finding(Severity.NOTE, "world_size", found, "the processes share cores and are slow")


def _describe_machine(machine: Machine) -> dict[str, Any]:
    return {
        "gpus": machine.num_gpus,
        "gpu": machine.gpu_name,
        "gpu_bytes": machine.gpu_bytes,
        "cores": machine.num_cores,
        "memory_bytes": machine.memory_bytes,
    }


def _describe_engine(
    engine: TrainEngineConfig, world: int, model: ModelFacts | None
) -> dict[str, Any]:
    strategy = resolve_strategy(engine, world)
    described: dict[str, Any] = {
        "world_size": world,
        "dp": strategy.dp_size,
        "cp": strategy.cp_size,
        "tp": strategy.tp_size,
    }
    if model is not None:
        described |= {
            "model_type": model.model_type,
            "num_parameters": model.num_parameters,
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_key_value_heads,
            "wrappable_layers": list_names(model.family.wrappable_classes),
        }
    return described
