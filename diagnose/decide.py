"""From findings to one verdict: the first failure over ranks and time, apart from what it caused.

Order of trust: a cause, then what the collectives of several ranks show together, then an unknown
exception that came before the symptoms, then a symptom, then a healthy log. Otherwise: unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fsdpbench.bench.records import Evidence, Verdict
from fsdpbench.diagnose.arithmetic import Value
from fsdpbench.diagnose.collectives import judge_collectives
from fsdpbench.diagnose.matching import (
    ErrorSign,
    Findings,
    Hit,
    drop_survived,
    hits_of_role,
    keep_valid,
)
from fsdpbench.diagnose.rules.schema import Role
from fsdpbench.diagnose.verdicts import MAX_TEXT, as_evidence, make_verdict

WINDOW_LINES = 150  # matches this close in one stream speak of one failure
SAME_MOMENT_SECONDS = 2.0
MAX_EVIDENCE = 5
SURE = 0.8  # a warning less surely harmless makes a log healthy only beside training steps


def decide(findings: Findings, first_rank: int | None = None) -> Verdict:
    """Judge all that was found in one run's logs. `first_rank` is known to have failed first."""
    hits = keep_valid(findings.hits, findings)
    logged = hits_of_role(hits, Role.CAUSE)
    causes = drop_survived(logged, findings)
    hinted = first_rank if first_rank is not None else _hinted_rank(hits)
    if causes:
        own = [hit for hit in causes if first_rank is not None and hit.line.rank == first_rank]
        return _verdict_of(_first_cause(own or causes), hits, hinted)
    symptoms = hits_of_role(hits, Role.SYMPTOM)
    earlier = _exceptions_before(findings.errors, symptoms)
    earlier.sort(key=lambda error: error.line.rank != first_rank)
    if earlier:
        return _unknown_exception(earlier[0], hits, hinted)
    together = judge_collectives(symptoms)
    if together is not None:
        return together
    if symptoms:
        best = max(symptoms, key=_weight)
        noticed = {hit.line.rank for hit in symptoms}
        return _verdict_of(best, hits, None if hinted in noticed else hinted)
    if logged:
        return _survived(logged)
    if findings.errors:
        return _unknown_noise(findings.errors)
    return _quiet(hits_of_role(hits, Role.BENIGN), findings)


def fill_cause(templates: Iterable[str], values: dict[str, Value]) -> str:
    """Fill the first sentence whose captures are all known."""
    template = ""
    for template in templates:
        try:
            return template.format_map(values)
        except (KeyError, ValueError):
            continue
    return re.sub(r"\s*\{[^}]*\}", "", template)


def _hinted_rank(hits: Iterable[Hit]) -> int | None:
    for hit in hits_of_role(hits, Role.HINT):
        if "rank" in hit.values:
            return int(hit.values["rank"])
    return None


def _first_cause(causes: Sequence[Hit]) -> Hit:
    streams: dict[object, list[Hit]] = {}
    for hit in causes:
        streams.setdefault(hit.line.stream, []).append(hit)
    candidates = [_best_of_stream(stream) for stream in streams.values()]
    best = candidates[0]
    for candidate in candidates[1:]:
        if _comes_before(candidate, best):
            best = candidate
    return best


def _best_of_stream(stream: Sequence[Hit]) -> Hit:
    first = min(hit.line.number for hit in stream)
    close = [hit for hit in stream if hit.line.number <= first + WINDOW_LINES]
    return max(close, key=_weight)


def _weight(hit: Hit) -> tuple[int, bool, int, int]:
    """Return what makes a match of one failure tell more than another."""
    return hit.rule.priority, "rank" in hit.values, len(hit.values), -hit.line.order


def _comes_before(one: Hit, other: Hit) -> bool:
    both = one.stamp is not None and other.stamp is not None
    if both and abs(one.stamp - other.stamp) > SAME_MOMENT_SECONDS:  # type: ignore[operator]
        return one.stamp < other.stamp  # type: ignore[operator]
    if one.rule.priority != other.rule.priority:
        return one.rule.priority > other.rule.priority
    if both and one.stamp != other.stamp:
        return one.stamp < other.stamp  # type: ignore[operator]
    return one.line.order < other.line.order


def _verdict_of(hit: Hit, hits: Sequence[Hit], hinted: int | None) -> Verdict:
    same_rule = [other for other in hits if other.rule.id == hit.rule.id and other is not hit]
    rank = _root_rank(hit, same_rule, hinted)
    others = [h for h in hits if h.rule.role in (Role.CAUSE, Role.SYMPTOM, Role.HINT)]
    shown = [hit, *same_rule[:2], *(other for other in others if other.rule.id != hit.rule.id)]
    return make_verdict(
        failure_class=hit.rule.failure_class,
        cause=fill_cause(hit.rule.cause, hit.values),
        root_rank=rank,
        phase=hit.phase,
        remedies=list(hit.rule.remedies),
        evidence=_evidence_of(shown),
        confidence=hit.rule.confidence,
        rule=hit.rule.id,
    )


def _root_rank(hit: Hit, same_rule: Sequence[Hit], hinted: int | None) -> int | None:
    if "rank" in hit.values:
        return int(hit.values["rank"])
    if hit.rule.role is Role.SYMPTOM:
        return hinted  # the rank that wrote this line only noticed
    if not hit.rule.blames_writer:
        return None
    if hit.line.rank is None:
        return hinted
    agrees = any(other.line.rank == hinted for other in same_rule)
    return hinted if hinted is not None and agrees else hit.line.rank


def _evidence_of(hits: Iterable[Hit]) -> list[Evidence]:
    shown: dict[tuple[str, int], Evidence] = {}
    for hit in hits:
        key = (hit.line.file, hit.line.number)
        if key not in shown and len(shown) < MAX_EVIDENCE:
            shown[key] = as_evidence(*key, hit.line.text)
    return list(shown.values())


def _exceptions_before(errors: Iterable[ErrorSign], symptoms: Sequence[Hit]) -> list[ErrorSign]:
    """Return unknown exceptions that no symptom precedes on their own stream or by the clock."""
    found = [
        error
        for error in errors
        if error.is_exception and not any(_precedes(hit, error) for hit in symptoms)
    ]
    timed = [error for error in found if error.stamp is not None]
    return sorted(timed, key=lambda e: e.stamp or 0.0) if len(timed) == len(found) else found


def _precedes(hit: Hit, error: ErrorSign) -> bool:
    if hit.line.stream == error.line.stream:
        return hit.line.number < error.line.number
    if hit.stamp is not None and error.stamp is not None:
        return hit.stamp < error.stamp - SAME_MOMENT_SECONDS
    return False


def _unknown_exception(error: ErrorSign, hits: Sequence[Hit], hinted: int | None) -> Verdict:
    rank = error.line.rank if error.line.rank is not None else hinted
    who = f"rank {rank}" if rank is not None else "a process"
    where = f" at {error.raised_in}" if error.raised_in else ""
    head = error.line.text.strip()[:MAX_TEXT]
    followers = [hit for hit in hits if hit.rule.role is Role.SYMPTOM]
    evidence = [as_evidence(error.line.file, error.line.number, error.line.text)]
    return make_verdict(
        failure_class="unknown",
        cause=f"{who} raised first{where}: {head}; no rule knows this error",
        root_rank=rank,
        remedies=["read the traceback above the first line of the evidence"],
        evidence=[*evidence, *_evidence_of(followers)][:MAX_EVIDENCE],
    )


def _unknown_noise(errors: Sequence[ErrorSign]) -> Verdict:
    first = errors[0]
    return make_verdict(
        failure_class="unknown",
        cause="an error was logged that no rule knows",
        root_rank=first.line.rank,
        evidence=[as_evidence(e.line.file, e.line.number, e.line.text) for e in errors[:3]],
        remedies=["pass the logs of all ranks: the first failure may stand in another file"],
    )


def _survived(logged: Sequence[Hit]) -> Verdict:
    first = logged[0]
    return make_verdict(
        failure_class="healthy",
        cause=f"the errors that were logged ({first.rule.id}) did not end the run: training goes "
        "on for many lines after the last of them",
        remedies=["look at them if they come back: each costs the step it strikes"],
        evidence=_evidence_of(logged),
        confidence=0.5,
        rule="error-survived",
    )


def _quiet(benign: Sequence[Hit], findings: Findings) -> Verdict:
    lines = sum(log.num_lines for log in findings.logs.values())
    stepped = any(log.last_progress_line for log in findings.logs.values())
    sure = [hit for hit in benign if hit.rule.confidence >= SURE]
    if sure or (benign and stepped):
        hit = max(sure or benign, key=lambda hit: (hit.rule.confidence, -hit.line.order))
        cause = fill_cause(hit.rule.cause, hit.values) or "the warnings in the log are harmless"
        return make_verdict(
            failure_class="healthy",
            cause=f"no failure: {cause}",
            remedies=list(hit.rule.remedies) or ["nothing to do"],
            evidence=_evidence_of(benign),
            confidence=hit.rule.confidence,
            rule=hit.rule.id,
        )
    if stepped:
        return make_verdict(
            failure_class="healthy",
            cause=f"no failure: steps are logged and no sign of an error stands in {lines} lines",
            remedies=["nothing to do"],
            confidence=0.6,
            rule="quiet-progress",
        )
    cause = f"no sign of a failure or of training stands in the {lines} lines read"
    if not lines:
        cause = "the log is empty"
    return make_verdict(
        failure_class="unknown",
        cause=cause,
        remedies=["pass the logs of all ranks and of the launcher"],
    )
