"""One run directory as the renderers see it: its records, its plan and what could not be read.

Curves of single trials are read only when a renderer asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdpbench.bench.folders import RunFolder, TrialFolder
from fsdpbench.bench.json_text import parse_object
from fsdpbench.bench.records import Record
from fsdpbench.bench.store import keep_latest, read_records
from fsdpbench.errors import ConfigError, Violation


@dataclass(frozen=True)
class Run:
    """The records of a sweep, one an id, with its plan and the problems met in reading."""

    folder: RunFolder
    records: tuple[Record, ...]
    sweep: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the run's directory."""
        return self.folder.path.resolve().name

    def trial(self, trial_id: str) -> TrialFolder | None:
        """Return the folder of a trial, None if it is gone or its id is no plain name."""
        if trial_id in ("", ".", "..") or "/" in trial_id or "\0" in trial_id:
            return None
        folder = self.folder.trial(trial_id)
        return folder if folder.path.is_dir() else None


def load_run(path: Path) -> Run:
    """Read a run directory; ConfigError if it is none. Damaged lines become `problems`."""
    folder = RunFolder(path)
    if not folder.results_path.exists() and not folder.sweep_path.exists():
        found = "no such directory" if not path.is_dir() else "no results.jsonl and no sweep.json"
        remedy = "give the directory that `fsdpbench sweep` printed (its --out)"
        raise ConfigError([Violation(str(path), found, "must be a run directory", remedy)])
    read = read_records(folder.results_path)
    problems = list(read.problems)
    if not folder.results_path.exists():
        problems.append(f"{folder.results_path}: not there; no trial has finished")
    records = keep_latest(read.records)
    if len(records) < len(read.records):
        repeated = len(read.records) - len(records)
        problems.append(f"{repeated} records were replaced by later ones of the same trials")
    sweep = _load_sweep(folder.sweep_path, problems)
    return Run(folder, tuple(records), sweep, tuple(problems))


def _load_sweep(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        return parse_object(path.read_bytes())
    except FileNotFoundError:
        problems.append(f"{path}: not there; the sweep's own command is not known")
    except OSError as error:
        problems.append(f"{path}: cannot be read, skipped: {error.strerror}")
    except ValueError as error:
        problems.append(f"{path}: not readable as JSON, skipped: {error}")
    return {}
