"""The folders of a sweep and of one trial: the names of their files, how each is written and read.

Both sides of every file meet here: the worker writes heartbeats, steps and the outcome, the runner
writes the specification and reads the rest. Whatever is read may be half written; see each reader.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from fsdpbench.bench.json_text import parse_object
from fsdpbench.bench.records import TrialSpec, WorkerOutcome, encode
from fsdpbench.errors import FsdpbenchError


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file or none of it: a temporary neighbour, fsync, then rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:  # an error, or the user's stop
        temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class Heartbeat:
    """What a rank said last, and when (Unix seconds)."""

    rank: int
    unix_seconds: float
    phase: str | None = None
    step: int | None = None


@dataclass(frozen=True)
class TrialFolder:
    """`RUN/trials/<id>`: one trial's specification, logs, samples and outcome."""

    path: Path

    @property
    def spec_path(self) -> Path:
        """`trial.json`, the TrialSpec."""
        return self.path / "trial.json"

    @property
    def logs(self) -> Path:
        """Folder of the launcher's log and the ranks' logs."""
        return self.path / "logs"

    @property
    def launcher_log(self) -> Path:
        """Output of the launcher itself."""
        return self.logs / "launcher.log"

    @property
    def steps_path(self) -> Path:
        """`steps.jsonl`: one line per finished step, appended by rank 0."""
        return self.path / "steps.jsonl"

    @property
    def samples_path(self) -> Path:
        """`samples.jsonl`: one line per sample of a recorder."""
        return self.path / "samples.jsonl"

    @property
    def heartbeats(self) -> Path:
        """Folder of the ranks' heartbeat files."""
        return self.path / "heartbeat"

    @property
    def outcome_path(self) -> Path:
        """`outcome.json`, the WorkerOutcome."""
        return self.path / "outcome.json"

    @property
    def trace_path(self) -> Path:
        """`trace.json`, the merged Chrome trace."""
        return self.path / "trace.json"

    @property
    def weights(self) -> Path:
        """`weights`: versions of the weights on their way through the disk; gone afterwards."""
        return self.path / "weights"

    def create(self, spec: TrialSpec) -> None:
        """Make the folder with its sub-folders and write the specification."""
        self.logs.mkdir(parents=True, exist_ok=True)
        self.heartbeats.mkdir(exist_ok=True)
        write_atomically(self.spec_path, spec.model_dump_json(indent=1) + "\n")

    def load_spec(self) -> TrialSpec:
        """Read the specification that the runner wrote; FsdpbenchError if it is damaged."""
        try:
            return TrialSpec.model_validate_json(self.spec_path.read_bytes())
        except OSError as error:
            raise FsdpbenchError(f"{self.spec_path}: cannot be read: {error.strerror}") from error
        except ValidationError as error:
            what = error.errors(include_url=False)[0]["msg"]
            raise FsdpbenchError(f"{self.spec_path}: is no trial's specification: {what}") from None

    def save_outcome(self, outcome: WorkerOutcome) -> None:
        """Write the outcome atomically. The caller sees to it that one process does so."""
        write_atomically(self.outcome_path, encode(outcome) + "\n")

    def load_outcome(self) -> WorkerOutcome | None:
        """Read the outcome; None if there is none, it cannot be read or is not an outcome."""
        try:
            return WorkerOutcome.model_validate_json(self.outcome_path.read_bytes())
        except (OSError, ValidationError):
            return None

    def beat(self, rank: int, phase: str, step: int | None = None) -> None:
        """Say that `rank` is alive in `phase`. Cheap: one small write, no fsync."""
        text = json.dumps({"phase": phase, "step": step})
        (self.heartbeats / f"rank{rank}").write_text(text, encoding="utf-8")

    def read_heartbeats(self) -> list[Heartbeat]:
        """Read what each rank said last; a beat that is being written right now has no phase."""
        beats = []
        for file in sorted(self.heartbeats.glob("rank*")):
            try:
                rank = int(file.name.removeprefix("rank"))
                unix_seconds = file.stat().st_mtime
                text = file.read_bytes()
            except (OSError, ValueError):  # gone, unreadable, or no heartbeat's name
                continue
            try:
                said = parse_object(text)
            except ValueError:
                beats.append(Heartbeat(rank, time.time()))
                continue
            phase, step = said.get("phase"), said.get("step")
            beats.append(
                Heartbeat(
                    rank,
                    unix_seconds,
                    phase if isinstance(phase, str) else None,
                    step if isinstance(step, int) else None,
                )
            )
        return sorted(beats, key=lambda beat: beat.rank)


@dataclass(frozen=True)
class RunFolder:
    """`RUN`: one sweep's plan, results, lock and trials."""

    path: Path

    @property
    def sweep_path(self) -> Path:
        """`sweep.json`: the resolved space and where it ran."""
        return self.path / "sweep.json"

    @property
    def results_path(self) -> Path:
        """`results.jsonl`, one Record a line."""
        return self.path / "results.jsonl"

    @property
    def lock_path(self) -> Path:
        """`lock`, held by the runner."""
        return self.path / "lock"

    @property
    def report_path(self) -> Path:
        """`report.html`."""
        return self.path / "report.html"

    def trial(self, trial_id: str) -> TrialFolder:
        """Return the folder of one trial."""
        return TrialFolder(self.path / "trials" / trial_id)
