"""Names the end of a trial: a status, and a reason in words, from what its processes left.

Order of trust: what the runner itself did, what the worker said, what the logs and the kernel show.
Why it failed and what to do is the explainer's work (`on_failure` of the runner).
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from fsdpbench.bench.folders import TrialFolder
from fsdpbench.bench.records import TrialSpec, TrialStatus, WorkerOutcome
from fsdpbench.bench.trial import TrialEnd
from fsdpbench.units import format_seconds

TAIL_BYTES = 256 * 1024  # of each log; what matters stands at the end
OOM_TEXT = re.compile(r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory")
HOST_OOM_TEXT = re.compile(
    r"DefaultCPUAllocator: (can't allocate memory|not enough memory)|^MemoryError\b", re.MULTILINE
)
# torchrun's summary of the rank that failed first
ROOT_CAUSE = re.compile(
    r"Root Cause.*?rank\s*:\s*(?P<rank>\d+).*?exitcode\s*:\s*(?P<code>-?\d+)", re.DOTALL
)
ERROR_LINE = re.compile(
    r"^(?:\[rank\d+\]:\s*)?(?P<error>(?:\w+\.)*\w*(?:Error|Exception|Violation)\b(?::.*)?)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Ending:
    """A trial's status and, unless it is ok, the reason."""

    status: TrialStatus
    reason: str | None = None


def classify_end(
    spec: TrialSpec, end: TrialEnd, outcome: WorkerOutcome | None, folder: TrialFolder
) -> Ending:
    """Say how the trial ended. A trial stopped by the user has no ending and must not come here."""
    if end.ended_by == "hang":
        return Ending(TrialStatus.HANG, _describe_hang(spec, folder))
    if end.ended_by == "timeout":
        limit = format_seconds(spec.timeout_seconds)
        return Ending(TrialStatus.TIMEOUT, f"still running after its limit of {limit}")
    if outcome is not None and outcome.status == "ok" and end.exit_code == 0:
        return Ending(TrialStatus.OK)
    if outcome is not None and outcome.status != "ok":
        return Ending(TrialStatus(outcome.status), outcome.error or "the worker gave no reason")
    return _read_the_logs(end, outcome, folder)


def _read_the_logs(end: TrialEnd, outcome: WorkerOutcome | None, folder: TrialFolder) -> Ending:
    logs = {path: read_tail(path) for path in list_logs(folder)}
    root = ROOT_CAUSE.search(logs.get(folder.launcher_log, ""))
    code = int(root["code"]) if root else end.exit_code
    where = f"rank {root['rank']}" if root else "the trial"
    error = _find_error(logs, int(root["rank"]) if root else None)
    text = "\n".join(logs.values())
    if OOM_TEXT.search(text):
        return Ending(TrialStatus.OOM, error or "out of device memory")
    if HOST_OOM_TEXT.search(text):
        return Ending(TrialStatus.HOST_OOM, error or "out of host memory")
    if code == -signal.SIGKILL and end.num_oom_kills > 0:
        return Ending(TrialStatus.HOST_OOM, f"{where} was killed by the kernel for want of memory")
    how = _describe_code(code)
    if outcome is not None:
        how += " after it had measured"
    if end.exit_code == 0:
        how = "ended without writing an outcome"
    reason = f"{where} {how}" + (f": {error}" if error else "")
    return Ending(TrialStatus.CRASHED, reason)


def _describe_code(code: int | None) -> str:
    if code is None:
        return "was killed from outside"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"died of {name}"


def _describe_hang(spec: TrialSpec, folder: TrialFolder) -> str:
    limit = format_seconds(spec.hang_seconds)
    beats = folder.read_heartbeats()
    if not beats:
        return f"no heartbeat in the first {limit}"
    first = min(beats, key=lambda beat: beat.unix_seconds)
    where = f"rank {first.rank}" if len(beats) > 1 else "it"
    step = "" if first.step is None else f", step {first.step}"
    return f"no heartbeat for {limit}; {where} fell silent first, in {first.phase}{step}"


def list_logs(folder: TrialFolder) -> list[Path]:
    """Return the trial's log files, the launcher's first."""
    found = sorted(path for path in folder.logs.rglob("*") if path.is_file())
    return sorted(found, key=lambda path: path != folder.launcher_log)


def read_tail(path: Path) -> str:
    """Return the end of a log as text; bytes that are no text are replaced."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def _find_error(logs: dict[Path, str], rank: int | None) -> str | None:
    """Return the last error line of the rank that failed first; of any rank if that is unknown.

    Errors of the other ranks are consequences and would mislead.
    """
    for path in sorted(logs, key=lambda path: "stderr" not in path.name):
        if path.name != "launcher.log" and rank in (None, _read_rank(path)):
            found = ERROR_LINE.findall(logs[path])
            if found:
                return str(found[-1]).strip()
    if rank is not None:
        return None
    launcher = "".join(text for path, text in logs.items() if path.name == "launcher.log")
    found = [line for line in ERROR_LINE.findall(launcher) if "ChildFailedError" not in line]
    return str(found[-1]).strip() if found else None


def _read_rank(log: Path) -> int | None:
    """Return the rank whose folder a log lies in, as torchrun names them."""
    return int(log.parent.name) if log.parent.name.isdecimal() else None
