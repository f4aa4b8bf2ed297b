"""The ranking: every trial that was started, best first, with what was measured.

Trials are ordered by tokens per second of the whole job; those that only sent their weights by the
pause of an update. Only status `ok` is ranked; a
contaminated trial keeps its numbers below them, then the failures. Points that were never
started (invalid, pruned) have a table of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fsdpbench.bench.records import Record, TrialStatus
from fsdpbench.reports.axes import Axes, plan_axes
from fsdpbench.reports.tables import (
    Cell,
    Column,
    Row,
    Table,
    absent,
    bytes_cell,
    difference_cell,
    percent_cell,
    rate_cell,
    seconds_cell,
    text_cell,
)

NOT_STARTED = (TrialStatus.INVALID, TrialStatus.PRUNED)
STEP_COLUMNS = ("rate", "difference", "rate_per_device", "step", "mfu")
SYNC_COLUMNS = ("pause", "transfer", "sync_bytes", "sync_share")
GPU_COLUMNS = ("mfu", "peak_device", "peak_reserved", "device_total")
CPU_NOTE = (
    "These trials ran on CPU processes, which have no device memory to report and no peak "
    "FLOP/s to take MFU of; those columns are left out."
)
MIXED_SIZES_NOTE = (
    "The trials use different world sizes: the order is by tokens/s of the whole job; "
    "the column {rate} compares their efficiency."
)


def rank_records(records: Sequence[Record]) -> list[Record]:
    """Return the started trials in ranking order: ok by tokens/s, contaminated, failures."""
    started = [record for record in records if record.status not in NOT_STARTED]
    return sorted(started, key=_ranking_key)


def is_cpu_run(records: Sequence[Record]) -> bool:
    """Say whether no trial used a GPU."""
    return bool(records) and all(record.device == "cpu" for record in records)


def best_rate(records: Sequence[Record]) -> float | None:
    """Return the highest tokens/s of the ok trials."""
    rates = [
        record.tokens_per_second
        for record in records
        if record.status is TrialStatus.OK and record.tokens_per_second is not None
    ]
    return max(rates, default=None)


def build_ranking(records: Sequence[Record]) -> Table:
    """Build the ranking of a run's records, in whatever order they come."""
    ranked = rank_records(records)
    axes = plan_axes(ranked)
    best = best_rate(ranked)
    on_cpu = is_cpu_run(ranked)
    notes = []
    if axes.constant:
        same = ", ".join(f"{title}={value}" for title, value in axes.constant)
        notes.append(f"The same in every trial: {same}.")
    per_device = "process" if on_cpu else "GPU"
    sizes = {record.world_size for record in ranked if record.status is TrialStatus.OK}
    if len(sizes) > 1 and best is not None:
        notes.append(MIXED_SIZES_NOTE.format(rate=f"tokens/s/{per_device}"))
    table = Table(
        title="Ranking",
        caption=_caption(ranked),
        columns=_columns(axes, per_device, _name_order(ranked)),
        rows=tuple(_row(place, record, axes, best) for place, record in enumerate(ranked, start=1)),
        notes=tuple(notes),
    )
    table = table.without(_columns_to_leave_out(ranked, on_cpu))
    if on_cpu:
        return Table(
            table.title, table.caption, table.columns, table.rows, (*table.notes, CPU_NOTE)
        )
    return table


def _ranking_key(record: Record) -> tuple[int, float, float, str]:
    order = {TrialStatus.OK: 0, TrialStatus.CONTAMINATED: 1}.get(record.status, 2)
    pause = math.inf if record.sync is None else record.sync.pause_seconds
    return order, -(record.tokens_per_second or 0.0), pause, record.id


def _caption(ranked: Sequence[Record]) -> str:
    measured = sum(record.status is TrialStatus.OK for record in ranked)
    if not ranked:
        return "No trial has been started."
    if not measured:
        return f"None of the {len(ranked)} trials that were started finished."
    by = _name_order(ranked)
    return f"{measured} of {len(ranked)} started trials measured, best first by {by}."


def _name_order(ranked: Sequence[Record]) -> str:
    """Name what the ok trials are ordered by."""
    sends = any(record.sync is not None for record in ranked)
    return "the pause of a weight update" if sends and best_rate(ranked) is None else "tokens/s"


def _columns_to_leave_out(ranked: Sequence[Record], on_cpu: bool) -> list[str]:
    left_out = list(GPU_COLUMNS) if on_cpu else []
    if on_cpu and any(record.mfu is not None for record in ranked):
        left_out.remove("mfu")
    if all(record.sync is None for record in ranked):
        left_out += SYNC_COLUMNS
    elif all(not record.step_seconds for record in ranked):
        left_out += STEP_COLUMNS
    if len({record.world_size for record in ranked}) <= 1:
        left_out.append("world_size")
    return left_out


def _columns(axes: Axes, per_device: str, order: str) -> tuple[Column, ...]:
    processes = "processes" if per_device == "process" else "GPUs"
    return (
        Column("place", "#", numeric=True, hint=f"Place by {order}; only ok trials have one."),
        *(Column(f"axis:{axis.path}", axis.title, hint=axis.path) for axis in axes.varied),
        Column("world_size", processes, numeric=True, hint="World size", priority=3),
        Column("rate", "tokens/s", numeric=True, hint="Real tokens per second of the whole job."),
        Column(
            "difference",
            "vs best",
            numeric=True,
            hint="Difference of tokens/s to the best trial, in per cent of the best.",
            priority=1,
        ),
        Column(
            "rate_per_device",
            f"tokens/s/{per_device}",
            numeric=True,
            hint=f"Tokens per second divided by the number of {processes}.",
            priority=5,
        ),
        Column(
            "step",
            "step median",
            numeric=True,
            hint="Median time of the steps after warm-up; below it the 95 % interval of the "
            "median (all steps where there are fewer than 6) and the number of steps.",
            priority=2,
        ),
        Column("mfu", "MFU", numeric=True, hint="Model FLOP/s utilisation.", priority=4),
        Column(
            "pause",
            "sync pause",
            numeric=True,
            hint="Median time for which an update of the weights stops generation; below it the "
            "95 % interval and the number of updates.",
        ),
        Column(
            "transfer",
            "sync transfer",
            numeric=True,
            hint="Median time of an update's bytes on the wire, or until they are in files.",
            priority=2,
        ),
        Column("sync_bytes", "sync bytes", numeric=True, hint="Bytes of one version.", priority=4),
        Column(
            "sync_share",
            "of limit",
            numeric=True,
            hint="xccl: share of the broadcast rate measured in the same run; disk: time of plain "
            "files over that of writing and reading.",
            priority=2,
        ),
        Column(
            "peak_device",
            "peak device",
            numeric=True,
            hint="peak_device_bytes: most bytes that the allocator gave out, maximum over ranks.",
            priority=3,
        ),
        Column(
            "peak_reserved",
            "peak reserved",
            numeric=True,
            hint="peak_reserved_bytes: most bytes that the allocator held, maximum over ranks.",
            priority=7,
        ),
        Column(
            "device_total",
            "device total",
            numeric=True,
            hint="device_total_bytes: most bytes in use on a device as nvidia-smi shows them.",
            priority=8,
        ),
        Column(
            "peak_host",
            "peak host",
            numeric=True,
            hint="peak_host_bytes: most resident host memory.",
            priority=6,
        ),
        Column("status", "status", hint="How the trial ended."),
    )


def _row(place: int, record: Record, axes: Axes, best: float | None) -> Row:
    ok = record.status is TrialStatus.OK
    missing = "not recorded" if ok else f"not measured: the trial ended as {record.status.value}"
    untrained = missing
    mfu_missing = "the device's peak FLOP/s is not known" if ok else missing
    if ok and record.sync is not None and not record.step_seconds:
        untrained = mfu_missing = "this trial only sent its weights"
    cells = (
        Cell(str(place), float(place)) if ok else absent(f"not ranked: {record.status.value}"),
        *(
            text_cell(record.axes[axis.path])
            if record.axes.get(axis.path) is not None
            else Cell("null" if axis.path in record.axes else "-", reason="not set in this trial")
            for axis in axes.varied
        ),
        text_cell(record.world_size, missing),
        rate_cell(record.tokens_per_second, untrained),
        difference_cell(record.tokens_per_second if ok else None, best, untrained),
        rate_cell(record.tokens_per_second_per_gpu, untrained),
        seconds_cell(record.step_seconds, untrained),
        percent_cell(record.mfu, mfu_missing),
        *_sync_cells(record, missing),
        bytes_cell(record.peak_device_bytes, missing),
        bytes_cell(record.peak_reserved_bytes, missing),
        bytes_cell(record.device_total_bytes, "NVML was not available" if ok else missing),
        bytes_cell(record.peak_host_bytes, missing),
        _status_cell(record),
    )
    return Row(record.id, cells, tone="" if ok else "bad")


def _sync_cells(record: Record, missing: str) -> tuple[Cell, ...]:
    sync = record.sync
    if sync is None:
        return (absent("no weights were sent"),) * len(SYNC_COLUMNS)
    steady = [entry for entry in sync.rounds if entry.kind == "steady"]
    share = sync.share_of_broadcast_limit if sync.mode == "xccl" else sync.share_of_disk_limit
    return (
        seconds_cell([entry.pause_seconds for entry in steady], missing),
        seconds_cell([entry.transfer_seconds for entry in steady], missing),
        bytes_cell(sync.bytes, missing),
        percent_cell(share, missing),
    )


def _status_cell(record: Record) -> Cell:
    if record.status is TrialStatus.OK:
        return Cell(
            "ok, unstable" if record.unstable else "ok", tone="warn" if record.unstable else "good"
        )
    tone = "warn" if record.status is TrialStatus.CONTAMINATED else "bad"
    return Cell(record.status.value, tone=tone)
