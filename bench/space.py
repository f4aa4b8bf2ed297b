"""The file that describes a sweep, and the options of the command line that change it.

A space says what to vary; `sweep` turns it into points. Reading it touches one file and no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from fsdpbench.bench.json_text import MAX_DEPTH, is_too_deep
from fsdpbench.bench.presets import DEFAULT_PRESET, PRESETS
from fsdpbench.engine.config.load import load_yaml, parse_yaml
from fsdpbench.engine.config.strict import Count, Positive, StrictModel, rule
from fsdpbench.errors import ConfigError, Violation

# YAML 1.1, which PyYAML reads, takes `1e-4` for text


class SweepSpace(StrictModel):
    """A sweep as its YAML file has it; every field may be left out."""

    kind: Literal["sweep"] = "sweep"
    """Says that the file is a sweep."""
    preset: str = DEFAULT_PRESET
    """Ready-made space that gives the axes where `axes` is empty."""
    model: str = ""
    """Model preset or local Hugging Face folder; empty: a small one that suits the device."""
    base: dict[str, Any] = Field(default_factory=dict)
    """TrainEngineConfig fields that all points share, nested or by dotted path."""
    workload: dict[str, Any] = Field(default_factory=dict)
    """Workload fields that all points share."""
    axes: dict[str, list[Any]] = Field(default_factory=dict)
    """Axis name to its values; the points are their product."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trials run; auto takes the GPUs if there are any."""
    world_size: Count | None = None
    """Processes at most; None: one per GPU, or 2 on a CPU."""
    timeout_seconds: Positive | None = None
    """Limit of one trial, start-up included."""
    hang_seconds: Positive | None = None
    """A trial without a heartbeat for this long is held to hang."""

    @rule("base")
    def _base_is_shallow(self) -> Violation | None:
        return _refuse_deep("base", self.base)

    @rule("workload")
    def _workload_is_shallow(self) -> Violation | None:
        return _refuse_deep("workload", self.workload)

    @rule("axes")
    def _axes_are_shallow(self) -> Violation | None:
        return _refuse_deep("axes", self.axes)

    @rule("preset")
    def _preset_exists(self) -> Violation | None:
        if self.preset in PRESETS:
            return None
        return Violation("preset", repr(self.preset), "is no preset", f"use {', '.join(PRESETS)}")


def _refuse_deep(where: str, value: Any) -> Violation | None:
    """Refuse what could be written into a record and never be read back."""
    if not is_too_deep(value):
        return None
    return Violation(where, "", f"is nested too deeply: {MAX_DEPTH} levels at most")


def load_space(path: Path) -> SweepSpace:
    """Read a space file; raises ConfigError with everything that is wrong in it."""
    return SweepSpace.model_validate(load_yaml(path))


def parse_axis(option: str) -> tuple[str, list[Any]]:
    """Parse `NAME=a,b`: the values are those of a YAML list without its brackets."""
    name, equals, text = option.partition("=")
    if not equals or not name or not text.strip():
        raise _refuse_axis(option, "must be NAME=VALUE,VALUE")
    try:
        values = parse_yaml(f"[{text}]")
    except yaml.YAMLError:
        values = None
    if not isinstance(values, list) or not values:
        raise _refuse_axis(option, "has values that are not YAML")
    return name.strip(), values


def parse_axes(options: Sequence[str]) -> dict[str, list[Any]]:
    """Parse all `--axis` options; an axis given twice is refused."""
    axes: dict[str, list[Any]] = {}
    for option in options:
        name, values = parse_axis(option)
        if name in axes:
            raise _refuse_axis(option, f"names the axis {name} a second time")
        axes[name] = values
    return axes


def combine(space: SweepSpace, changes: Mapping[str, Any]) -> SweepSpace:
    """Return the space with options applied: axes are added or replaced one by one."""
    given = {name: value for name, value in changes.items() if value not in (None, {}, "")}
    if "axes" in given:
        given["axes"] = {**space.axes, **given["axes"]}
    if "workload" in given:
        given["workload"] = {**space.workload, **given["workload"]}
    return space.with_changes(given)


def _refuse_axis(option: str, problem: str) -> ConfigError:
    example = "for example --axis gradient_checkpointing=true,false"
    return ConfigError([Violation("--axis", repr(option), problem, example)])
