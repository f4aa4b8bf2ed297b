"""Which axes a sweep may vary, what each one sets, and the points that their values span.

An axis is a field of TrainEngineConfig by its dotted path, an alias of one, a field of the
workload, `fault`, or `dp`, `cp`, `tp`: these three together stand for one axis of backend strings.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from fsdpbench.bench.records import WorkloadSpec
from fsdpbench.engine.config.parallel import FSDPParallelStrategy, format_backend
from fsdpbench.engine.config.strict import field_paths
from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.errors import ConfigError, Violation

ALL = "all"
"""As the only value of `parallel`, `dp`, `cp` or `tp`: every degree that fits the world size."""

ALIASES = {"parallel": "backend", "model": "path"}
DEGREES = ("dp", "cp", "tp")
# `seed` alone is the engine's; the workload's is `workload.seed`
WORKLOAD_FIELDS = tuple(name for name in WorkloadSpec.model_fields if name not in ("kind", "seed"))

Section = Literal["config", "workload", "fault"]


@dataclass(frozen=True)
class Axis:
    """One axis of a space, with the field that its values are written to."""

    name: str
    section: Section
    path: str
    values: tuple[Any, ...]


def list_axis_names() -> list[str]:
    """Return every name that an axis may have, fields that hold other fields included."""
    fields = list(field_paths(TrainEngineConfig))
    parents = {
        path.rsplit(".", depth)[0] for path in fields for depth in range(1, path.count(".") + 1)
    }
    workload = [*WORKLOAD_FIELDS, *(f"workload.{name}" for name in (*WORKLOAD_FIELDS, "seed"))]
    return [*ALIASES, *DEGREES, *fields, *sorted(parents), *workload, "fault"]


def resolve_axes(axes: Mapping[str, Sequence[Any]], world_size: int) -> list[Axis]:
    """Turn named value lists into axes; raises ConfigError with all that is wrong."""
    violations = [
        violation
        for name, values in axes.items()
        for violation in (_check_name(name), _check_values(name, values))
        if violation is not None
    ]
    if violations:
        raise ConfigError(violations)
    resolved: list[Axis] = []
    for name, values in axes.items():
        if name in DEGREES:
            continue
        section, path = _find_target(name)
        if path == "backend" and tuple(values) == (ALL,):
            values = list_backends(world_size, {})
        resolved.append(Axis(name, section, path, tuple(values)))
    degrees = {name: axes[name] for name in DEGREES if name in axes}
    if degrees:
        backends = list_backends(world_size, degrees)
        resolved.insert(0, Axis("parallel", "config", "backend", tuple(backends)))
    _check_overlaps(resolved)
    return resolved


def iterate_grid(axes: Sequence[Axis]) -> Iterator[tuple[tuple[Axis, Any], ...]]:
    """Yield each combination of values, the last axis turning fastest."""
    for values in itertools.product(*(axis.values for axis in axes)):
        yield tuple(zip(axes, values, strict=True))


def list_backends(world_size: int, degrees: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return the backends dp x cp x tp = world size whose degrees are in the lists given.

    Without a list for it, `dp` takes what the others leave, and `cp` and `tp` take 1 if any list is
    given at all. A degree that was asked for and fits no factorisation comes out as a backend of
    its own, so that it is recorded as invalid instead of dropped.
    """
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]

    def allowed(name: str) -> Sequence[int]:
        if name not in degrees:
            return divisors if name == "dp" or not degrees else (1,)
        return divisors if tuple(degrees[name]) == (ALL,) else tuple(degrees[name])

    lists = {name: allowed(name) for name in DEGREES}
    fitting = [
        dict(zip(DEGREES, sizes, strict=True))
        for sizes in itertools.product(*(lists[name] for name in DEGREES))
        if sizes[0] * sizes[1] * sizes[2] == world_size
    ]
    misfits = [
        {**dict.fromkeys(DEGREES, 1), name: size}
        for name in DEGREES
        if name in degrees and tuple(degrees[name]) != (ALL,)
        for size in lists[name]
        if not any(sizes[name] == size for sizes in fitting)
    ]
    fitting.sort(key=lambda sizes: (-sizes["dp"], -sizes["cp"]))
    return list(dict.fromkeys(_format(sizes) for sizes in (*fitting, *misfits)))


def _format(sizes: Mapping[str, int]) -> str:
    return format_backend(
        FSDPParallelStrategy(
            data_parallel_size=sizes["dp"],
            context_parallel_size=sizes["cp"],
            tensor_parallel_size=sizes["tp"],
        )
    )


def _find_target(name: str) -> tuple[Section, str]:
    if name == "fault":
        return "fault", name
    if name in WORKLOAD_FIELDS:
        return "workload", name
    if name.startswith("workload."):
        return "workload", name.removeprefix("workload.")
    return "config", ALIASES.get(name, name)


def _check_name(name: str) -> Violation | None:
    names = list_axis_names()
    if name in names:
        return None
    ends = [known for known in names if known.endswith(f".{name}")]
    close = ends or get_close_matches(name, names, n=1, cutoff=0.5)
    remedy = f"did you mean {close[0]!r}?" if close else "docs/sweep.md lists the axes"
    return Violation(f"axes.{name}", "", "is no field that a sweep can vary", remedy)


def _check_values(name: str, values: Any) -> Violation | None:
    if not isinstance(values, list | tuple) or not values:
        return Violation(f"axes.{name}", repr(values), "must be a list of one value or more")
    if name not in DEGREES or tuple(values) == (ALL,):
        return None
    wrong = [value for value in values if type(value) is not int or value < 1]
    if wrong:
        return Violation(
            f"axes.{name}", repr(wrong[0]), "must be a degree of 1 or more", f"or the word {ALL}"
        )
    return None


def _check_overlaps(axes: Sequence[Axis]) -> None:
    """Refuse two axes that set the same field, or a field and its parent."""
    violations = [
        Violation(
            f"axes.{second.name}", "", f"sets the same field as axes.{first.name}", "leave one out"
        )
        for first, second in itertools.combinations(axes, 2)
        if first.section == second.section
        and (
            f"{first.path}.".startswith(f"{second.path}.")
            or f"{second.path}.".startswith(f"{first.path}.")
        )
    ]
    if violations:
        raise ConfigError(violations)
