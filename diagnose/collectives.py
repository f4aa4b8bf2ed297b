"""What the collective time-outs of several ranks say together: who is missing or does otherwise.

Each rank's watchdog reports only the operation that it waits in. Side by side they show a rank that
entered another operation under the same number, or one that never entered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdpbench.bench.records import Evidence, Verdict
from fsdpbench.diagnose.matching import Hit
from fsdpbench.diagnose.verdicts import as_evidence, make_verdict

_RULE = "nccl-watchdog-timeout"


@dataclass(frozen=True)
class Wait:
    """The operation that one rank waited in until its time was up."""

    rank: int
    sequence: int
    operation: str
    num_elements: int | None
    hit: Hit


def judge_collectives(symptoms: Iterable[Hit]) -> Verdict | None:
    """Compare the waits of the ranks; None where they show nothing beyond a time-out."""
    waits = _first_waits(symptoms)
    if len(waits) < 2:
        return None
    by_sequence: dict[int, list[Wait]] = {}
    for wait in waits:
        by_sequence.setdefault(wait.sequence, []).append(wait)
    for sequence, group in sorted(by_sequence.items()):
        if len({(wait.operation, wait.num_elements) for wait in group}) > 1:
            return _mismatch(sequence, group)
    if len(by_sequence) > 1:
        return _left_behind(by_sequence)
    return None


def _first_waits(symptoms: Iterable[Hit]) -> list[Wait]:
    waits: dict[int, Wait] = {}
    for hit in symptoms:
        if hit.rule.id != _RULE or "sequence" not in hit.values or "operation" not in hit.values:
            continue
        rank = int(hit.values["waiter"]) if "waiter" in hit.values else hit.line.rank
        if rank is None or rank in waits:
            continue
        elements = hit.values.get("elements")
        waits[rank] = Wait(
            rank,
            int(hit.values["sequence"]),
            str(hit.values["operation"]),
            None if elements is None else int(elements),
            hit,
        )
    return sorted(waits.values(), key=lambda wait: wait.rank)


def _mismatch(sequence: int, group: Sequence[Wait]) -> Verdict:
    odd = min(group, key=lambda wait: sum(_same(wait, other) for other in group))
    said = ", ".join(f"rank {wait.rank} in {_describe(wait)}" for wait in group[:4])
    return make_verdict(
        failure_class="nccl",
        cause=f"the ranks entered different operations as collective number {sequence}: {said}",
        root_rank=odd.rank if len(group) > 2 else None,
        remedies=[
            "make the branch that leads to the extra collective depend on the step or on a value "
            "broadcast from one rank, never on local time or local data",
            "set TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 and compare the "
            "ranks' dumps; TORCH_DISTRIBUTED_DEBUG=DETAIL names the call at once",
        ],
        evidence=_evidence(group),
        confidence=0.9,
        rule="nccl-collective-mismatch",
    )


def _left_behind(by_sequence: dict[int, list[Wait]]) -> Verdict:
    first, last = min(by_sequence), max(by_sequence)
    behind = by_sequence[first]
    said = ", ".join(f"rank {wait.rank} in {_describe(wait)}" for wait in behind[:4])
    waits = [wait for group in by_sequence.values() for wait in group]
    return make_verdict(
        failure_class="nccl",
        cause=f"the ranks are not at the same collective: numbers {first} to {last}; furthest "
        f"behind: {said}",
        root_rank=behind[0].rank if len(behind) == 1 else None,
        remedies=[
            f"look at what rank {behind[0].rank} did before number {first}: it skipped or delayed "
            "a collective",
            "set TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 and compare the "
            "ranks' dumps",
        ],
        evidence=_evidence(waits),
        confidence=0.7,
        rule="nccl-rank-behind",
    )


def _same(one: Wait, other: Wait) -> bool:
    return (one.operation, one.num_elements) == (other.operation, other.num_elements)


def _describe(wait: Wait) -> str:
    if wait.num_elements is None:
        return wait.operation
    return f"{wait.operation} of {wait.num_elements} elements"


def _evidence(waits: Iterable[Wait]) -> list[Evidence]:
    lines = [wait.hit.line for wait in waits]
    return [as_evidence(line.file, line.number, line.text) for line in lines[:5]]
