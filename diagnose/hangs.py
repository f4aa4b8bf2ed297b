"""Judges a trial that was stopped by its watchdog, from heartbeats and stacks alone."""

from __future__ import annotations

from pathlib import Path

from fsdpbench.bench.classify import list_logs
from fsdpbench.bench.folders import Heartbeat, TrialFolder
from fsdpbench.bench.records import Evidence, Verdict
from fsdpbench.diagnose.prefixes import rank_of_path
from fsdpbench.diagnose.stacks import Frame, read_last_stack, waits_for_others
from fsdpbench.diagnose.verdicts import as_evidence, make_verdict

SILENT_SECONDS = 5.0  # a beat this much older than the others' shows who stopped first


def judge_hang(folder: TrialFolder, silent: bool) -> Verdict:
    """Say which rank stopped and where.

    `silent`: no rank beat any more; otherwise the trial ran into its time limit.
    """
    beats = folder.read_heartbeats()
    if not beats:
        return _never_started()
    if not silent:
        return _slow(beats, folder)
    stacks = {rank: stack for rank, stack in _read_stacks(folder).items() if stack}
    stuck = _find_stuck(beats, stacks)
    evidence = [_beat_evidence(folder, beat) for beat in beats[:4]]
    if stuck is None:
        return _deadlock(beats, stacks, evidence)
    where = _describe(stuck)
    frames = stacks.get(stuck.rank)
    stack = f"; its stack stands in {frames[0]}" if frames else ""
    others = "; the other ranks wait for it in a collective" if len(beats) > 1 else ""
    return make_verdict(
        failure_class="other",
        cause=f"rank {stuck.rank} stopped {where}{stack}{others}",
        root_rank=stuck.rank,
        phase=stuck.phase,
        remedies=[
            f"look at what rank {stuck.rank} does at that point: its log, or py-spy dump --pid PID "
            "while it hangs (a lock, a slow or dead file system, a data loader without data)",
            "raise --hang-timeout only if that work is known to take so long",
        ],
        evidence=evidence,
        confidence=0.85 if frames else 0.75,
        rule="rank-hung",
    )


def _never_started() -> Verdict:
    return make_verdict(
        failure_class="unknown",
        cause="no rank reported anything before the trial was stopped: start-up (imports, process "
        "group) hangs or takes longer than the limit",
        remedies=[
            "raise --hang-timeout: a busy machine or a cold file system imports slowly",
            "run the trial's command by hand and look where it stays: py-spy dump --pid PID",
        ],
    )


def _find_stuck(beats: list[Heartbeat], stacks: dict[int, list[Frame]]) -> Heartbeat | None:
    """Return the one rank that is behind the others, or whose stack does not wait for anybody."""
    if len(beats) == 1:
        return beats[0]
    if len(stacks) == len(beats):
        busy = [beat for beat in beats if not waits_for_others(stacks[beat.rank])]
        if len(busy) == 1:
            return busy[0]
    places = {beat.rank: (-1 if beat.step is None else beat.step, beat.phase) for beat in beats}
    lowest = min(step for step, _ in places.values())
    behind = [beat for beat in beats if places[beat.rank][0] == lowest]
    if len(behind) == 1:
        return behind[0]
    alone = [b for b in beats if sum(places[b.rank] == place for place in places.values()) == 1]
    if len(alone) == 1 and len(beats) > 2:
        return alone[0]
    oldest, second = sorted(beats, key=lambda beat: beat.unix_seconds)[:2]
    gap = second.unix_seconds - oldest.unix_seconds
    if gap > SILENT_SECONDS or (len(beats) == 2 and oldest.phase != second.phase):
        return oldest
    return None


def _deadlock(
    beats: list[Heartbeat], stacks: dict[int, list[Frame]], evidence: list[Evidence]
) -> Verdict:
    first = min(beats, key=lambda beat: beat.unix_seconds)
    said = ", ".join(f"rank {rank} in {stack[0]}" for rank, stack in sorted(stacks.items())[:4])
    return make_verdict(
        failure_class="nccl",
        cause=f"all {len(beats)} ranks stopped {_describe(first)}: they wait for each other in "
        f"collectives that do not match{': ' + said if said else ''}",
        phase=first.phase,
        remedies=[
            "run again with TORCH_DISTRIBUTED_DEBUG=DETAIL, which names a collective that differs",
            "on GPUs: TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1",
        ],
        evidence=evidence,
        confidence=0.6,
        rule="ranks-wait-for-each-other",
    )


def _slow(beats: list[Heartbeat], folder: TrialFolder) -> Verdict:
    last = max(beats, key=lambda beat: beat.unix_seconds)
    return make_verdict(
        failure_class="performance",
        cause=f"the trial still worked at its time limit: last heartbeat {_describe(last)}",
        root_rank=None,
        phase=last.phase,
        remedies=["raise --timeout, or ask for fewer steps or tokens", "look at the slowest phase"],
        evidence=[_beat_evidence(folder, last)],
        confidence=0.7,
        rule="trial-too-slow",
    )


def _describe(beat: Heartbeat) -> str:
    phase = beat.phase or "an unknown phase"
    return f"in {phase}" + ("" if beat.step is None else f" of step {beat.step}")


def _beat_evidence(folder: TrialFolder, beat: Heartbeat) -> Evidence:
    file = folder.heartbeats / f"rank{beat.rank}"
    return as_evidence(str(file), 1, f"phase={beat.phase} step={beat.step}")


def _read_stacks(folder: TrialFolder) -> dict[int, list[Frame]]:
    stacks: dict[int, list[Frame]] = {}
    for path in list_logs(folder):
        rank = rank_of_path(str(path))
        if rank is not None:
            frames = read_last_stack(Path(path))
            if frames or rank not in stacks:
                stacks[rank] = frames
    return stacks
