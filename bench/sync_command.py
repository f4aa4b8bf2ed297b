"""One call of `fsdpbench sync`: options to a sweep of one point, and its record to an answer.

Pure but for making paths absolute. The one trial trains nothing: it builds the engine, sends its
weights and ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fsdpbench.bench.invocation import SweepOptions, resolve_paths
from fsdpbench.bench.records import Record
from fsdpbench.bench.space import SweepSpace
from fsdpbench.bench.sweep import SweepPlan
from fsdpbench.bench.sync_plan import DEFAULT_SYNC_ROUNDS
from fsdpbench.engine.config.parallel import parse_backend
from fsdpbench.errors import ConfigError, Violation


@dataclass(frozen=True)
class SyncOptions:
    """The options as given; None means not given."""

    model: str | None = None
    parallel: str = "fsdp:d1"
    mode: Literal["xccl", "disk"] = "xccl"
    receivers: int = 1
    bucket_mb: int = 1024
    rounds: int = DEFAULT_SYNC_ROUNDS
    verify: bool = True
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_seconds: float | None = None
    out: Path | None = None

    @property
    def folder_options(self) -> SweepOptions:
        """What names the run's folder."""
        return SweepOptions(model=f"sync-{Path(self.model or 'default').name}", out=self.out)


def build_space(options: SyncOptions) -> SweepSpace:
    """Return the space of one point; raises ConfigError for a mesh that cannot be read."""
    if options.rounds < 1:
        raise ConfigError([Violation("--rounds", str(options.rounds), "must be 1 or more")])
    strategy = parse_backend(options.parallel).strategy
    space = SweepSpace(
        model=options.model or "",
        axes={
            "parallel": [options.parallel],
            "weight_update_mode": [options.mode],
            "sync_receivers": [options.receivers],
            "sync_bucket_mb": [options.bucket_mb],
        },
        workload={
            "steps": 0,
            "warmup_steps": 0,
            "sync_rounds": options.rounds,
            "sync_verify": options.verify,
        },
        device=options.device,
        world_size=strategy.world_size,
        timeout_seconds=options.timeout_seconds,
    )
    return resolve_paths(space)


def check_plan(plan: SweepPlan) -> None:
    """Raise ConfigError with all reasons if the one point cannot be run."""
    violations = [violation for point in plan.points for violation in point.violations]
    if violations:
        raise ConfigError(violations)


def build_answer(run: Path, record: Record | None) -> dict[str, Any]:
    """Return the JSON object of the command; figures are null where the trial has none."""
    sync = record.sync if record is not None else None
    names = (
        "mode",
        "receivers",
        "bytes",
        "num_buckets",
        "pause_seconds",
        "gather_seconds",
        "pack_seconds",
        "write_seconds",
        "transfer_seconds",
        "apply_seconds",
        "verify_seconds",
        "bandwidth_bytes_per_second",
        "broadcast_limit_bytes_per_second",
        "share_of_broadcast_limit",
        "share_of_disk_limit",
        "logprob_error",
    )
    return {
        "verified": sync is not None and sync.verified,
        **{name: None if sync is None else getattr(sync, name) for name in names},
        "rounds": [] if sync is None else [entry.model_dump() for entry in sync.rounds],
        "status": None if record is None else record.status.value,
        "reason": None if record is None else record.reason,
        "verdict": None
        if record is None or record.verdict is None
        else record.verdict.model_dump(mode="json", by_alias=True),
        "run": str(run),
    }
