"""A failing rank's last words: `errors/rank<k>.json`, and the trial's outcome if it is the first.

The files are written before the process ends, hence before its peers can fail in consequence: the
outcome that exists first names the root. An error that only says that a peer is gone writes no
outcome: a killed peer leaves no words, and its exit code is the better witness. Errors are observed
here, never stopped. No device is asked to finish its work: it may never do so.
"""

from __future__ import annotations

import errno
import json
import os
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch

from fsdpbench.bench.folders import TrialFolder, write_atomically
from fsdpbench.bench.measurement import Measurement, build_outcome
from fsdpbench.bench.records import WorkerOutcome, encode
from fsdpbench.errors import PeerError

Exhausted = Literal["device", "host"]

DEVICE_MEMORY_TEXTS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
HOST_MEMORY_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "Cannot allocate memory",
)
LOST_PEER_TEXTS = (  # gloo, NCCL, the store
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "Failed to recv, got 0 bytes",
)
# A function of the engine, and the phase that an error below it belongs to.
PHASES_BY_FUNCTION: dict[str, str] = {
    "resolve_path": "build",
    "build_meta_model": "build",
    "parallelize_model": "parallelize",
    "materialize_model": "load",
    "build_optimizer": "build",
    "plan_microbatches_over_ranks": "plan",
    "run_forward": "forward",
    "backward": "backward",
    "apply_optimizer_step": "optimizer",
    "gradient_norm": "clip",
}


def name_exhausted_memory(error: BaseException) -> Exhausted | None:
    """Say which memory ran out; None if the error is about something else."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "device"
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return "host"
    if isinstance(error, RuntimeError):
        if any(part in text for part in DEVICE_MEMORY_TEXTS):
            return "device"
        if any(part in text for part in HOST_MEMORY_TEXTS):
            return "host"
    return None


def names_lost_peer(error: BaseException) -> bool:
    """Say whether the error tells of a peer's end only, and not of a fault of this rank."""
    if isinstance(error, PeerError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in LOST_PEER_TEXTS)


def find_phase(trace: TracebackType | None) -> str | None:
    """Return the engine's phase that an error came from, read from the functions it passed."""
    phase = None
    for frame in traceback.extract_tb(trace):
        phase = PHASES_BY_FUNCTION.get(frame.name, phase)
        if phase == "backward":
            return phase  # recomputed forwards below belong to it
    return phase


def summarise_error(error: BaseException, rank: int, phase: str, step: int | None) -> str:
    """Return one line: where, which type, and the message's first line."""
    kind = type(error)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    message = str(error).strip().splitlines()
    where = f"rank {rank}, {phase}" + ("" if step is None else f", step {step}")
    return f"{where}: {name}" + (f": {message[0]}" if message else "")


class RankErrors:
    """Watches a `with` body for an error and writes it down; also says where the rank stands."""

    def __init__(self, folder: TrialFolder, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self.phase = "start"
        self.step: int | None = None
        self.measure_memory: Callable[[], Mapping[str, Any]] = dict
        self.describe: Callable[[], Measurement] = Measurement

    def enter(self, phase: str, step: int | None = None) -> None:
        """Say that this rank is alive and begins a phase."""
        self.phase, self.step = phase, step
        self.folder.beat(self.rank, phase, step)

    @property
    def path(self) -> Path:
        """Where this rank's error goes."""
        return self.folder.path / "errors" / f"rank{self.rank}.json"

    def __enter__(self) -> RankErrors:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):  # an interrupt or an exit is no failure of the trial
            self._write(error, trace)

    def _write(self, error: Exception, trace: TracebackType | None) -> None:
        phase = find_phase(trace) or self.phase
        exhausted = name_exhausted_memory(error)
        kind = type(error)
        words = {
            "rank": self.rank,
            "type": f"{kind.__module__}.{kind.__qualname__}",
            "message": str(error),
            "traceback": "".join(traceback.format_exception(kind, error, trace)),
            "phase": phase,
            "step": self.step,
            "exhausted_memory": exhausted,
            "lost_peer": names_lost_peer(error),
            "memory": dict(self.measure_memory()),
            "unix_seconds": time.time(),
            "process_id": os.getpid(),
        }
        self.path.parent.mkdir(exist_ok=True)
        write_atomically(self.path, json.dumps(words, indent=1) + "\n")
        if words["lost_peer"]:
            return
        statuses = {"device": "oom", "host": "host_oom", None: "crashed"}
        summary = summarise_error(error, self.rank, phase, self.step)
        save_first_outcome(
            self.folder,
            build_outcome(self.describe(), status=statuses[exhausted], error=summary),
        )


def save_first_outcome(folder: TrialFolder, outcome: WorkerOutcome) -> bool:
    """Write the outcome unless there is one; say whether this one was written."""
    temporary = folder.path / f".outcome.{os.getpid()}.tmp"
    temporary.write_text(encode(outcome) + "\n", encoding="utf-8")
    try:
        os.link(temporary, folder.outcome_path)  # fails where rename would replace
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True
