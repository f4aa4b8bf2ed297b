"""The one family of errors that users see, and the record a violation is written in.

A message says where, what was found, what is allowed and what to do, in this order. Checks collect
`Violation`s and raise them together, so that a user mends a configuration in one go.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """One broken rule of a configuration, an environment or a file."""

    where: str  # dotted field path, parameter name, file or rank
    found: str
    allowed: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        tail = "; ".join(part for part in (self.allowed, self.remedy) if part)
        head = f"{self.where}={self.found}" if self.found else self.where
        return f"{head}: {tail}" if tail else head


class FsdpbenchError(Exception):
    """Base of every error that is the user's to mend."""


class ViolationError(FsdpbenchError, ValueError):
    """Several violations reported at once; `violations` holds them."""

    def __init__(self, violations: Iterable[Violation] | str) -> None:
        if isinstance(violations, str):
            violations = [Violation(violations, "")]
        self.violations: tuple[Violation, ...] = tuple(violations)
        super().__init__("\n".join(str(violation) for violation in self.violations))


class ConfigError(ViolationError):
    """A configuration field, or a combination of fields, breaks a rule."""


class TopologyError(ViolationError):
    """Parallel degrees do not fit the world size, the model or the machine."""


class CheckpointError(FsdpbenchError):
    """A checkpoint is missing, incomplete or of another format or model."""


class WeightSyncError(FsdpbenchError):
    """Weights could not be carried to the rollout side, or arrived wrong."""


class WorkerError(FsdpbenchError):
    """A worker process failed, hung or could not be started."""


class PeerError(WorkerError):
    """This rank is well and stops because another one failed, whose error is the cause."""


def list_names(names: Iterable[str], limit: int = 5) -> str:
    """Join names for a message: at most `limit`, then how many more there are."""
    ordered = list(names)
    shown = ", ".join(ordered[:limit])
    rest = len(ordered) - limit
    return f"{shown} and {rest} more" if rest > 0 else shown
