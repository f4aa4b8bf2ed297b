"""What a sweep stores and what its processes say to each other: the documented data contract.

Records, trial specifications and worker outcomes are frozen, torch-free, and JSON both ways; a
number that is not finite travels as the string "NaN" or "Infinity", so every line is strict JSON.
This module decides nothing and touches no file (see `folders` and `store`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from fsdpbench.bench.sync_record import SyncRecord

SCHEMA_VERSION = 1
"""Version of `Record`, written in each one; a reader refuses records of a newer version."""

FailureClass = Literal[
    "mesh",
    "cuda_oom",
    "host_oom",
    "nccl",
    "rendezvous",
    "weight_sync",
    "checkpoint",
    "attention_install",
    "dtype",
    "dtensor",
    "numeric",
    "rank_death",
    "storage",
    "performance",
    "healthy",
    "other",
    "unknown",
]
FAILURE_CLASSES: tuple[str, ...] = get_args(FailureClass)
"""What a `Verdict` may call a failure."""

DeviceName = Literal["cpu", "cuda"]


class TrialStatus(StrEnum):
    """How a trial ended."""

    OK = "ok"
    INVALID = "invalid"  # refused before a process was started
    PRUNED = "pruned"  # not run: predicted to be infeasible
    OOM = "oom"  # device memory
    HOST_OOM = "host_oom"
    HANG = "hang"  # heartbeats stopped; killed by the watchdog
    TIMEOUT = "timeout"  # ran past its limit while still beating
    CRASHED = "crashed"
    CONTAMINATED = "contaminated"  # measured beside a foreign process

    @property
    def is_failure(self) -> bool:
        """Say whether a worker failed: such a trial makes the sweep exit with code 5."""
        return self not in (TrialStatus.OK, TrialStatus.INVALID, TrialStatus.PRUNED)


class _Message(BaseModel):
    """Base of the strict messages: an unknown key is a mistake of the writer."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class _Stored(BaseModel):
    """Base of what is kept for years: a reader skips keys that were added after it."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", ser_json_inf_nan="strings", populate_by_name=True
    )


class Evidence(_Stored):
    """One line of a log that a verdict rests on."""

    file: str
    line: int  # from 1
    text: str


class Verdict(_Stored):
    """Why a run failed: the first cause, where it happened and what to do."""

    failure_class: FailureClass = Field(alias="class")
    cause: str
    root_rank: int | None = None
    phase: str | None = None
    remedies: list[str] = []
    evidence: list[Evidence] = []
    confidence: float = Field(default=0.0, ge=0.0, le=1.0)
    rule: str | None = None


class WorkloadSpec(_Message):
    """What a trial trains on and for how long."""

    kind: Literal["sft"] = "sft"
    data: str | None = None
    """JSONL or text file; None: the bundled default data."""
    sequence_lengths: list[int] | None = None
    """Lengths of the sequences of a step, per data-parallel rank; None: as the data has them."""
    tokens_per_step: int = Field(default=1024, ge=2)
    """Tokens of one optimizer step on each data-parallel rank; the sum of `sequence_lengths` where
    these are given."""
    steps: int = Field(default=6, ge=0)
    """Measured steps, after warm-up: the run makes `warmup_steps + steps` steps. 0 with sync_rounds
    only."""
    warmup_steps: int = Field(default=2, ge=0)
    seed: int = 1
    sync_rounds: int = Field(default=0, ge=0, validate_default=True)
    """Weight updates after the steps that count, behind a cold one and a warm-up one; 0: none."""
    sync_receivers: int = Field(default=1, ge=1, le=64)
    """Rollout processes that receive the weights."""
    sync_bucket_mb: int = Field(default=1024, ge=1)
    """MiB of a bucket on the wire. xccl only."""
    sync_verify: bool = True
    """Compare a checksum of each tensor on both ends of every update, and log-probs at the end."""

    @model_validator(mode="before")
    @classmethod
    def _add_up_lengths(cls, values: Any) -> Any:
        """Let lengths decide the tokens of a step; what is wrong with them is said elsewhere."""
        if not isinstance(values, dict) or "tokens_per_step" in values:
            return values
        lengths = values.get("sequence_lengths")
        if not isinstance(lengths, list | tuple) or any(type(n) is not int for n in lengths):
            return values
        num_tokens = sum(lengths)
        return values if num_tokens < 2 else {**values, "tokens_per_step": num_tokens}

    @field_validator("sync_rounds")
    @classmethod
    def _does_something(cls, sync_rounds: int, info: ValidationInfo) -> int:
        if sync_rounds == 0 and info.data.get("steps") == 0:
            raise ValueError("must be 1 or more where workload.steps is 0")
        return sync_rounds

    @property
    def num_steps(self) -> int:
        """All training steps of the run."""
        return self.steps + self.warmup_steps

    @property
    def syncs(self) -> bool:
        """Whether the trial ends with weight updates."""
        return self.sync_rounds > 0


class TrialSpec(_Message):
    """All that a worker process needs to know; stored as `trial.json` in the trial's folder."""

    id: str
    axes: dict[str, Any] = {}
    config: dict[str, Any]
    """A complete TrainEngineConfig as plain values."""
    workload: WorkloadSpec = WorkloadSpec()
    world_size: int = Field(default=1, ge=1)
    device: DeviceName = "cpu"
    fault: str | None = None
    """`NAME@STEP[:rank=RANK]`: a fault that the worker makes on purpose (see `faults`)."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    hang_seconds: float = Field(default=120.0, gt=0)
    """A trial in which no rank's heartbeat moves for this long is held to hang."""


class WorkerOutcome(_Message):
    """What the worker measured, or how it failed; `outcome.json`, written once and atomically."""

    status: Literal["ok", "oom", "host_oom", "crashed"] = "ok"
    error: str | None = None
    """First line of the exception when `status` is not ok."""
    environment: dict[str, Any] = {}
    """Facts only a process with torch knows (torch, nccl, cuda, gpu, ...)."""
    step_seconds: list[float] = []
    """Raw times of the steps after warm-up."""
    warmup_steps: int = 0
    losses: list[float] = []
    """Loss of every step, warm-up included."""
    grad_norms: list[float] = []
    tokens_per_step: float | None = None
    """Real tokens of one step over all data-parallel ranks, mean of the measured steps."""
    tokens_per_second: float | None = None
    flops_per_step: float | None = None
    mfu: float | None = None
    mfu_formula: str | None = None
    peak_device_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_total_bytes: int | None = None
    peak_host_bytes: int | None = None
    phases: dict[str, float] = {}
    """Median seconds by phase name."""
    attention_kernel: str | None = None
    sync: SyncRecord | None = None
    """What the weight updates took; None without any."""


class Record(_Stored):
    """One trial as `results.jsonl` keeps it. `reason` says in words why a trial is not ok."""

    schema_version: int = SCHEMA_VERSION
    id: str
    status: TrialStatus
    unstable: bool = False
    axes: dict[str, Any] = {}
    config: dict[str, Any] = {}
    workload: dict[str, Any] = {}
    environment: dict[str, Any] = {}
    commit: str | None = None
    dirty: bool | None = None
    started_at: str | None = None
    """UTC, ISO 8601."""
    duration_seconds: float | None = None
    """Wall time of the trial's processes, start-up included."""
    exit_code: int | None = None
    model: str | None = None
    device: DeviceName | None = None
    world_size: int | None = None
    command: list[str] = []
    """The launch command, to repeat the trial by hand."""
    step_seconds: list[float] = []
    warmup_steps: int = 0
    losses: list[float] = []
    grad_norms: list[float] = []
    tokens_per_step: float | None = None
    tokens_per_second: float | None = None
    tokens_per_second_per_gpu: float | None = None
    """Per process where there is no GPU."""
    flops_per_step: float | None = None
    mfu: float | None = None
    mfu_formula: str | None = None
    peak_device_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_total_bytes: int | None = None
    peak_host_bytes: int | None = None
    phases: dict[str, float] = {}
    attention_kernel: str | None = None
    sync: SyncRecord | None = None
    reason: str | None = None
    verdict: Verdict | None = None


def encode(message: BaseModel) -> str:
    """Return the message as one line of strict JSON, with the public key names."""
    return message.model_dump_json(by_alias=True)
