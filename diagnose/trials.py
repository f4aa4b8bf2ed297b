"""Explains a trial or a whole run from its folder: error files, heartbeats, stacks, then the logs.

The worker's `errors/rank<k>.json` say which rank failed first and in which phase; the logs say why.
"""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpbench.bench.classify import list_logs
from fsdpbench.bench.folders import RunFolder, TrialFolder
from fsdpbench.bench.json_text import parse_object
from fsdpbench.bench.records import Record, TrialStatus, Verdict
from fsdpbench.bench.store import keep_latest, read_records
from fsdpbench.diagnose.decide import decide
from fsdpbench.diagnose.hangs import judge_hang
from fsdpbench.diagnose.log_files import open_log
from fsdpbench.diagnose.matching import build_matcher
from fsdpbench.diagnose.prefixes import rank_of_path
from fsdpbench.diagnose.verdicts import make_verdict
from fsdpbench.log import get_logger, warn_once

logger = get_logger(__name__)


@dataclass(frozen=True)
class RankError:
    """What one rank said as it failed."""

    rank: int
    file: str
    traceback: str
    phase: str | None
    unix_seconds: float
    lost_peer: bool  # it only tells of another rank's failure


@dataclass(frozen=True)
class TrialVerdict:
    """One trial of a run and why it ended so."""

    id: str
    status: TrialStatus
    verdict: Verdict | None


def is_run_folder(path: Path) -> bool:
    """Say whether a folder is a run."""
    run = RunFolder(path)
    if run.sweep_path.is_file() or any(map(is_trial_folder, (path / "trials").glob("*"))):
        return True
    return run.results_path.is_file() and bool(read_records(run.results_path).records)


def is_trial_folder(path: Path) -> bool:
    """Say whether a folder is a trial of a run."""
    trial = TrialFolder(path)
    return trial.spec_path.is_file() or (trial.logs.is_dir() and trial.heartbeats.is_dir())


def explain_trial(path: Path, record: Record | None = None) -> Verdict:
    """Explain one trial. Without a record its status is looked up in the run's store."""
    folder = TrialFolder(path)
    record = record or _find_record(path)
    status = record.status if record else None
    if record is not None and status in (TrialStatus.INVALID, TrialStatus.PRUNED):
        return _refused(record)
    errors = read_rank_errors(folder)
    verdict = _judge_logs(folder, errors)
    if status is TrialStatus.OK and verdict.failure_class == "unknown":
        return make_verdict(failure_class="healthy", cause="the trial ended well", confidence=0.9)
    told = verdict.confidence >= 0.7 and verdict.failure_class not in ("healthy", "unknown")
    if status in (TrialStatus.HANG, TrialStatus.TIMEOUT) and not told:
        verdict = judge_hang(folder, status is TrialStatus.HANG)
    if record is not None and status is TrialStatus.HOST_OOM:
        verdict = _say_host_memory(verdict, record)
    return _point_into_files(_add_phase(verdict, folder, errors), errors)


def explain_run(path: Path) -> tuple[Verdict, list[TrialVerdict]]:
    """Explain each trial of a run that did not end well; the first such verdict stands for the run.

    Raises OSError or StoreError where the store cannot be read.
    """
    run = RunFolder(path)
    read = read_records(run.results_path)
    for problem in read.problems:
        warn_once(logger, problem)
    records = keep_latest(read.records)
    trials = [_judge_record(run, record) for record in records]
    known = {record.id for record in records}
    unrecorded = [
        folder
        for folder in sorted((path / "trials").glob("*"))
        if folder.name not in known and folder.is_dir()
    ]
    trials += [
        TrialVerdict(folder.name, TrialStatus.CRASHED, explain_trial(folder))
        for folder in unrecorded
        if read_rank_errors(TrialFolder(folder))
    ]
    failed = [trial for trial in trials if trial.status.is_failure and trial.verdict]
    if failed:
        first = failed[0].verdict
        assert first is not None
        return first, trials
    refused = sum(trial.status is TrialStatus.INVALID for trial in trials)
    if not trials:
        return make_verdict(
            failure_class="unknown", cause="the run holds no finished trial"
        ), trials
    cause = f"no failure: none of {len(trials)} trials failed"
    cause += f", {refused} points were refused as invalid" if refused else ""
    return make_verdict(failure_class="healthy", cause=cause, confidence=0.95), trials


def read_rank_errors(folder: TrialFolder) -> list[RankError]:
    """Read the ranks' error files, first failure first; a damaged file is skipped.

    Ranks that only lost a peer come last, however early they said so.
    """
    found = []
    for file in sorted((folder.path / "errors").glob("rank*.json")):
        try:
            said = parse_object(file.read_bytes())
            rank = int(said.get("rank", rank_of_path(file.name) or 0))
            text = str(said.get("traceback") or f"{said['type']}: {said.get('message', '')}")
            when = float(said.get("unix_seconds", file.stat().st_mtime))
            time.localtime(when)  # raises for what is no moment
            phase, lost_peer = _text_or_none(said.get("phase")), said.get("lost_peer") is True
            found.append(RankError(rank, str(file), text, phase, when, lost_peer))
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            warn_once(logger, f"{file}: not a rank's error, skipped ({error})")
    return sorted(found, key=lambda error: (error.lost_peer, error.unix_seconds))


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _judge_logs(folder: TrialFolder, errors: Sequence[RankError]) -> Verdict:
    matcher = build_matcher()
    for path in list_logs(folder):
        try:
            with open_log(path) as stream:
                summary = matcher.scanner.scan(stream, str(path), rank_of_path(str(path)))
        except OSError:
            continue  # a log that vanished or may not be read; the others still speak
        matcher.findings.logs[str(path)] = summary
    for error in errors:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(error.unix_seconds))
        lines = "".join(f"{stamp} {line}\n" for line in error.traceback.splitlines())
        text = io.BytesIO(lines.encode("utf-8", errors="replace"))
        matcher.findings.logs[error.file] = matcher.scanner.scan(text, error.file, error.rank)
    return decide(matcher.findings, errors[0].rank if errors else None)


def _add_phase(verdict: Verdict, folder: TrialFolder, errors: Sequence[RankError]) -> Verdict:
    if verdict.phase is not None or verdict.failure_class == "healthy":
        return verdict
    phases = {error.rank: error.phase for error in errors}
    phases |= {
        beat.rank: beat.phase for beat in folder.read_heartbeats() if beat.rank not in phases
    }
    rank = verdict.root_rank if verdict.root_rank is not None else min(phases, default=None)
    phase = None if rank is None else phases.get(rank)
    return verdict if phase is None else verdict.model_copy(update={"phase": phase})


def _point_into_files(verdict: Verdict, errors: Sequence[RankError]) -> Verdict:
    """Give evidence from an error file the line of its traceback there; logs come first."""
    files = {error.file for error in errors}
    pointed = [
        item.model_copy(update={"line": _traceback_line(item.file)}) if item.file in files else item
        for item in verdict.evidence
    ]
    unique = {(item.file, item.line): item for item in reversed(pointed)}
    ordered = [item for item in pointed if unique[item.file, item.line] is item]
    ordered.sort(key=lambda item: item.file in files)
    return verdict.model_copy(update={"evidence": ordered})


def _traceback_line(file: str) -> int:
    lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
    found = (number for number, line in enumerate(lines, start=1) if '"traceback"' in line)
    return next(found, 1)


def _say_host_memory(verdict: Verdict, record: Record) -> Verdict:
    if verdict.failure_class == "host_oom":
        return verdict
    return make_verdict(
        failure_class="host_oom",
        cause=record.reason or "the kernel killed a process for want of host memory",
        root_rank=verdict.root_rank,
        phase=verdict.phase,
        remedies=[
            "use less host memory: offload_params: false where the GPUs have room, "
            "memory_efficient_load: true, fewer processes per node",
            "give the job more memory: container or Slurm limit, more RAM, swap",
        ],
        evidence=verdict.evidence,
        confidence=0.9,
        rule="host-oom-counted",
    )


_MESH_FIELDS = ("backend", "world_size", "tensor_parallel", "context_parallel", "data_parallel")


def _refused(record: Record) -> Verdict:
    reason = record.reason or "the point was refused"
    mesh = any(field in reason for field in _MESH_FIELDS)
    return make_verdict(
        failure_class="mesh" if mesh else "other",
        cause=f"refused before it was started: {reason}",
        phase="init",
        remedies=["change the named axes; `fsdpdiag check` lists every violation of a config"],
        confidence=0.95,
        rule="trial-refused",
    )


def _judge_record(run: RunFolder, record: Record) -> TrialVerdict:
    if record.verdict is not None or record.status is TrialStatus.OK:
        return TrialVerdict(record.id, record.status, record.verdict)
    return TrialVerdict(record.id, record.status, explain_trial(run.trial(record.id).path, record))


def _find_record(path: Path) -> Record | None:
    results = RunFolder(path.resolve().parent.parent).results_path
    if not results.is_file():
        return None
    records = keep_latest(read_records(results).records)
    return next((record for record in records if record.id == path.resolve().name), None)
