"""From one rank's steps and all ranks' peaks to the outcome of a trial. Pure arithmetic.

A peak is the highest of any rank: what the worst-off process needs. Rates are over all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean
from typing import Any

from fsdpbench.bench.flops import describe_mfu
from fsdpbench.bench.records import WorkerOutcome
from fsdpbench.bench.sync_record import SyncRecord
from fsdpbench.bench.timing import StepRecord, summarise_rate


@dataclass(frozen=True)
class Peaks:
    """The highest memory use of a rank in bytes; None where it cannot be known."""

    peak_device_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_total_bytes: int | None = None
    peak_host_bytes: int | None = None


@dataclass(frozen=True)
class Measurement:
    """What rank 0 knows at the end of a trial, or what a rank knew when it failed."""

    steps: Sequence[StepRecord] = ()
    step_flops: Sequence[float] = ()  # of each step, over all ranks
    peaks: Sequence[Peaks] = ()  # of each rank
    phases: Mapping[str, float] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    attention_kernel: str | None = None
    gpu_name: str | None = None
    dtype: str = "bfloat16"
    world_size: int = 1
    sync: SyncRecord | None = None


def merge_peaks(peaks: Sequence[Peaks]) -> Peaks:
    """Return the highest value of each field; None where no rank knows it."""
    merged = {}
    for entry in fields(Peaks):
        known = [getattr(peak, entry.name) for peak in peaks]
        merged[entry.name] = max((value for value in known if value is not None), default=None)
    return Peaks(**merged)


def build_outcome(measurement: Measurement, **failure: Any) -> WorkerOutcome:
    """Return the outcome; `failure` holds `status` and `error` when there was one."""
    steps = measurement.steps
    measured = [step for step in steps if not step.warmup]
    flops_per_second = summarise_rate(steps, measurement.step_flops)
    peak_flops, formula = describe_mfu(
        measurement.gpu_name, measurement.dtype, measurement.world_size
    )
    flops = [
        amount
        for step, amount in zip(steps, measurement.step_flops, strict=True)
        if not step.warmup
    ]
    mfu = flops_per_second / peak_flops if flops_per_second and peak_flops else None
    return WorkerOutcome(
        **failure,
        environment=dict(measurement.environment),
        step_seconds=[step.seconds for step in measured],
        warmup_steps=len(steps) - len(measured),
        losses=[step.loss for step in steps],
        grad_norms=[step.grad_norm for step in steps],
        tokens_per_step=fmean(step.num_tokens for step in measured) if measured else None,
        tokens_per_second=summarise_rate(steps, [step.num_tokens for step in steps]),
        flops_per_step=fmean(flops) if flops else None,
        mfu=mfu,
        mfu_formula=formula,
        phases=dict(measurement.phases),
        attention_kernel=measurement.attention_kernel,
        sync=measurement.sync,
        **vars(merge_peaks(measurement.peaks)),
    )
