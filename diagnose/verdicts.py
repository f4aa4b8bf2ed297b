"""Makes verdicts and their evidence; nothing leaves here without its secrets taken out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fsdpbench.bench.records import Evidence, FailureClass, Verdict
from fsdpbench.diagnose.redact import redact

MAX_TEXT = 400


def make_verdict(
    failure_class: FailureClass,
    cause: str,
    *,
    root_rank: int | None = None,
    phase: str | None = None,
    remedies: Iterable[str] = (),
    evidence: Sequence[Evidence] = (),
    confidence: float = 0.0,
    rule: str | None = None,
) -> Verdict:
    """Return a verdict whose cause is redacted."""
    return Verdict.model_validate(
        {
            "class": failure_class,
            "cause": redact(cause),
            "root_rank": root_rank,
            "phase": phase,
            "remedies": list(remedies),
            "evidence": list(evidence),
            "confidence": confidence,
            "rule": rule,
        }
    )


def as_evidence(file: str, number: int, text: str) -> Evidence:
    """Make one piece of evidence: redacted, cut to a readable length."""
    shown = redact(text.strip())
    cut = shown if len(shown) <= MAX_TEXT else shown[:MAX_TEXT] + " [...]"
    return Evidence(file=file, line=number, text=cut)
