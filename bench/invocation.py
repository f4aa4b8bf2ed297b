"""One call of `fsdpbench sweep`: from the options given to a space, a run folder and a plan."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from fsdpbench.bench.folders import RunFolder
from fsdpbench.bench.json_text import parse_object
from fsdpbench.bench.space import SweepSpace, combine, load_space, parse_axes
from fsdpbench.engine.models.presets import PRESETS
from fsdpbench.errors import ConfigError, Violation

RUNS = Path("runs")


@dataclass(frozen=True)
class SweepOptions:
    """The options as given; None or empty means not given."""

    space: Path | None = None
    axes: list[str] = field(default_factory=list)
    preset: str | None = None
    model: str | None = None
    data: Path | None = None
    out: Path | None = None
    resume: bool = False
    timeout_seconds: float | None = None
    hang_seconds: float | None = None
    world_size: int | None = None
    device: Literal["auto", "cpu", "cuda"] | None = None

    @property
    def describes_space(self) -> bool:
        """Say whether any option says what to sweep."""
        given = (self.space, self.preset, self.model, self.data, self.world_size, self.device)
        return bool(self.axes) or any(value is not None for value in given)


def resolve_space(options: SweepOptions, folder: RunFolder) -> SweepSpace:
    """Combine file and options; a bare `--resume` takes the space that the run began with."""
    if options.resume and not options.describes_space:
        space = _load_saved_space(folder)
    else:
        space = load_space(options.space) if options.space else SweepSpace()
    combined = combine(
        space,
        {
            "axes": parse_axes(options.axes),
            "preset": options.preset,
            "model": options.model,
            "workload": {"data": str(options.data)} if options.data else {},
            "timeout_seconds": options.timeout_seconds,
            "hang_seconds": options.hang_seconds,
            "world_size": options.world_size,
            "device": options.device,
        },
    )
    return resolve_paths(combined)


def choose_run_folder(options: SweepOptions) -> RunFolder:
    """Return --out; without it the newest run for `--resume`, else a new folder under runs/."""
    if options.out is not None:
        if options.out.exists() and not options.out.is_dir():
            raise ConfigError([Violation("--out", str(options.out), "is not a folder")])
        return RunFolder(options.out)
    if options.resume:
        begun = sorted(RUNS.glob("*/sweep.json"), key=lambda path: path.stat().st_mtime)
        if not begun:
            remedy = "name the run with --out"
            raise ConfigError([Violation("--resume", "", f"no sweep was begun in {RUNS}/", remedy)])
        return RunFolder(begun[-1].parent)
    return RunFolder(_name_new_folder(options))


def _name_new_folder(options: SweepOptions) -> Path:
    subject = Path(options.model or (options.space.stem if options.space else "sweep")).name
    stem = f"{datetime.now().strftime('%Y%m%d-%H%M%S')}-{re.sub(r'[^A-Za-z0-9._-]', '-', subject)}"
    folder, number = RUNS / stem, 1
    while folder.exists():
        number += 1
        folder = RUNS / f"{stem}-{number}"
    return folder


def _load_saved_space(folder: RunFolder) -> SweepSpace:
    path = folder.sweep_path
    try:
        content = parse_object(path.read_bytes())
        return SweepSpace.model_validate(content["space"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = "cannot be read as the plan of a sweep"
        remedy = "give the sweep's own options again together with --resume"
        raise ConfigError([Violation(str(path), "", f"{problem}: {error}", remedy)]) from None


def resolve_paths(space: SweepSpace) -> SweepSpace:
    """Make paths absolute, for trials run in folders of their own."""
    changes: dict[str, Any] = {"model": _resolve_model(space.model)}
    if "path" in space.base:
        changes["base"] = {**space.base, "path": _resolve_model(space.base["path"])}
    if "data" in space.workload:
        data = _resolve_data(space.workload["data"])
        changes["workload"] = {**space.workload, "data": data}
    axes = dict(space.axes)
    for name, values in space.axes.items():
        if name in ("model", "path"):
            axes[name] = [_resolve_model(value) for value in values]
        elif name in ("data", "workload.data"):
            axes[name] = [_resolve_data(value) for value in values]
    return combine(space, {**changes, "axes": axes})


def _resolve_model(model: Any) -> Any:
    if not isinstance(model, str) or not model.strip() or "\0" in model or model in PRESETS:
        return model
    folder = _make_absolute(model)
    return os.path.realpath(folder) if os.path.isdir(folder) else model  # noqa: PTH112


def _resolve_data(data: Any) -> Any:
    """Return the path made absolute; whether its text can be read is judged for each point."""
    if not isinstance(data, str) or not data.strip() or "\0" in data:
        return data
    return _make_absolute(data)


def _make_absolute(path: str) -> str:
    # unlike Path, this takes the ~ of a user who does not exist for a part of the name
    return os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111
