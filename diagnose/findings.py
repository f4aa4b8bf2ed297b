"""What the commands of `fsdpdiag` return, as objects and as JSON.

The JSON shapes are a contract (docs/diagnose.md): keys are added, never renamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

from fsdpbench.bench.records import Verdict
from fsdpbench.diagnose.trials import TrialVerdict
from fsdpbench.errors import Violation


class ExitCode(IntEnum):
    """Exit codes of `fsdpdiag`; the same table holds for `fsdpbench`."""

    FINE = 0
    USER_ERROR = 1  # an input cannot be read
    USAGE = 2  # given by the command-line library itself
    PROBLEM = 4
    UNDECIDED = 6


class Severity(StrEnum):
    """How much a finding matters."""

    PROBLEM = "problem"  # the run would fail
    NOTE = "note"  # worth knowing; the run would start
    UNDECIDED = "undecided"  # could not be checked here


@dataclass(frozen=True)
class Finding:
    """One thing that a check found."""

    severity: Severity
    where: str
    found: str
    allowed: str = ""
    remedy: str = ""

    @classmethod
    def of(cls, violation: Violation, severity: Severity = Severity.PROBLEM) -> Finding:
        """Make a finding of a violation."""
        parts = (violation.where, violation.found, violation.allowed, violation.remedy)
        return cls(severity, *parts)


@dataclass(frozen=True)
class CheckReport:
    """Everything a check of one configuration found, and what it was checked against."""

    config: str
    kind: str
    world_size: int | None
    findings: tuple[Finding, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    """What was compared: degrees, model and machine."""

    @property
    def exit_code(self) -> ExitCode:
        """A problem outranks what could not be decided."""
        severities = {finding.severity for finding in self.findings}
        if Severity.PROBLEM in severities:
            return ExitCode.PROBLEM
        return ExitCode.UNDECIDED if Severity.UNDECIDED in severities else ExitCode.FINE

    def as_json(self) -> dict[str, Any]:
        """Return the documented object."""
        return {
            "config": self.config,
            "kind": self.kind,
            "world_size": self.world_size,
            "ok": self.exit_code is ExitCode.FINE,
            "findings": [asdict(finding) for finding in self.findings],
            "facts": self.facts,
        }


def verdict_as_json(verdict: Verdict, trials: Sequence[TrialVerdict] = ()) -> dict[str, Any]:
    """Return the documented object of an explanation; a run's has `trials` too."""
    shown = verdict.model_dump(mode="json", by_alias=True)
    keys = ["class", "cause", "root_rank", "phase", "remedies", "evidence", "confidence", "rule"]
    result = {key: shown[key] for key in keys}
    if trials:
        result["trials"] = [
            {
                "id": trial.id,
                "status": str(trial.status),
                "verdict": verdict_as_json(trial.verdict) if trial.verdict else None,
            }
            for trial in trials
        ]
    return result


def exit_code_of(verdict: Verdict) -> ExitCode:
    """Say how an explanation ends: healthy 0, a failure named 4, unknown 6."""
    if verdict.failure_class == "healthy":
        return ExitCode.FINE
    return ExitCode.UNDECIDED if verdict.failure_class == "unknown" else ExitCode.PROBLEM
