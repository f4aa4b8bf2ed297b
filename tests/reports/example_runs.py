"""Run directories made from a seed: what the reports' tests render."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

from fsdpbench.bench.folders import RunFolder
from fsdpbench.bench.records import Evidence, Record, TrialStatus, Verdict, encode
from fsdpbench.bench.sync_record import SyncRecord, SyncRound, name_round, summarise_rounds
from fsdpbench.units import GIB, MIB

START = 1_790_000_000.0
VERDICTS = {
    TrialStatus.OOM: Verdict(
        failure_class="cuda_oom",
        cause="rank 1 ran out of GPU memory in the backward pass",
        root_rank=1,
        phase="backward",
        remedies=["set gradient_checkpointing: true", "set fsdp.offload_params: true"],
        evidence=[
            Evidence(
                file="logs/rank1/stderr.log",
                line=214,
                text="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.64 GiB.",
            )
        ],
        confidence=0.98,
        rule="cuda_oom.allocator",
    ),
    TrialStatus.HANG: Verdict(
        failure_class="nccl",
        cause="rank 0 never entered the all-reduce that rank 1 waits in",
        root_rank=0,
        phase="optimizer",
        remedies=["look for a branch on the rank around a collective"],
        evidence=[Evidence(file="logs/rank1/stderr.log", line=88, text="Watchdog caught timeout")],
        confidence=0.7,
        rule="nccl.watchdog",
    ),
}


def make_record(index: int = 0, **changes: Any) -> Record:
    """Return an ok record of a GPU trial, its numbers drawn from the index."""
    rng = random.Random(index)
    seconds = 0.4 + 0.05 * index
    world_size = changes.get("world_size", 2)
    rate = world_size * 4096 / seconds
    fields: dict[str, Any] = {
        "id": f"t{index:03d}",
        "status": TrialStatus.OK,
        "axes": {"parallel": "fsdp:d2", "gradient_checkpointing": index % 2 == 0},
        "environment": {"torch": "2.13.0", "gpu": {"name": "NVIDIA H200", "count": 2}},
        "commit": "0123456789abcdef",
        "dirty": False,
        "started_at": f"2026-11-30T03:{index % 60:02d}:00Z",
        "duration_seconds": 30.0 + index,
        "exit_code": 0,
        "model": "qwen3-0.6b",
        "device": "cuda",
        "world_size": world_size,
        "command": ["python", "-m", "torch.distributed.run", "--nproc-per-node", str(world_size)],
        "step_seconds": [seconds * (1 + rng.uniform(-0.03, 0.05)) for _ in range(8)],
        "warmup_steps": 2,
        "losses": [6.2 - 0.3 * step + rng.uniform(0, 0.1) for step in range(10)],
        "tokens_per_step": world_size * 4096.0,
        "tokens_per_second": rate,
        "tokens_per_second_per_gpu": rate / world_size,
        "mfu": 0.52 - 0.02 * index if index < 20 else 0.1,
        "mfu_formula": "6 * N * tokens / (peak * GPUs)",
        "peak_device_bytes": int((18 + 2.5 * (index % 9)) * GIB),
        "peak_reserved_bytes": int((20 + 2.5 * (index % 9)) * GIB),
        "device_total_bytes": int((22 + 2.5 * (index % 9)) * GIB),
        "peak_host_bytes": int((3 + 0.1 * (index % 7)) * GIB),
        "phases": {
            "init": 2.0,
            "load": 1.5,
            "forward": seconds * 0.3,
            "backward": seconds * 0.5,
            "clip": seconds * 0.05,
            "optimizer": seconds * 0.1,
        },
        "attention_kernel": "varlen_attn",
    }
    return Record(**{**fields, **changes})


def make_cpu_record(index: int = 0, **changes: Any) -> Record:
    """Return an ok record of a trial on CPU processes."""
    absent = ("mfu", "mfu_formula", "peak_device_bytes", "peak_reserved_bytes")
    fields: dict[str, Any] = dict.fromkeys((*absent, "device_total_bytes"))
    fields.update(device="cpu", model="tiny-qwen3", attention_kernel="sdpa_per_sequence")
    fields.update(environment={"torch": "2.13.0+cpu", "cpu": "2 cores"})
    fields.update(peak_host_bytes=int((420 + 9 * index) * MIB))
    return make_record(index, **{**fields, **changes})


def make_failed(index: int, status: TrialStatus, **changes: Any) -> Record:
    """Return a record of a failed trial, with a verdict where the table above has one."""
    keep = {"axes", "environment", "device", "model", "world_size", "duration_seconds"}
    whole = make_record(index).model_dump(include=keep)
    fields = {"exit_code": 1, "reason": f"worker ended as {status.value}", **whole, **changes}
    return Record(id=f"t{index:03d}", status=status, verdict=VERDICTS.get(status), **fields)


def make_synced(index: int, **changes: Any) -> Record:
    """Return an ok record of a trial that trained, then sent its weights in four rounds."""
    rounds = [
        SyncRound(kind=name_round(i), pause_seconds=0.1 * (index + 1), transfer_seconds=0.05)
        for i in range(4)
    ]
    sync = SyncRecord(
        mode="xccl",
        receivers=1,
        bytes=4 * GIB,
        rounds=rounds,
        verified=True,
        share_of_broadcast_limit=0.875,
        **summarise_rounds(rounds),
    )
    return make_record(index, **{"sync": sync, **changes})


def make_sync_only(index: int, **changes: Any) -> Record:
    """Return an ok record of a trial with `steps: 0`, which only sent its weights."""
    names = ("tokens_per_step", "tokens_per_second", "tokens_per_second_per_gpu", "mfu")
    fields: dict[str, Any] = dict.fromkeys(names)
    fields.update(step_seconds=[], losses=[], warmup_steps=0)
    fields.update(axes={"model": "qwen3-0.6b", "sync_verify": index % 2 == 0})
    fields.update(phases={"init": 2.0, "load": 1.5, "update_weights": 0.6, "forward": 0.02})
    return make_synced(index, **{**fields, **changes})


def _make_sync_runs() -> dict[str, list[Record]]:
    cpu = {"device": "cpu", "model": "tiny-llama", "peak_device_bytes": None}
    cpu |= {"peak_reserved_bytes": None, "device_total_bytes": None, "mfu_formula": None}
    sent = [make_sync_only(index) for index in (1, 0)]
    failed = make_failed(2, TrialStatus.OOM, axes={"model": "qwen3-8b", "sync_verify": True})
    hung = make_failed(3, TrialStatus.HANG, axes=failed.axes, losses=[6.0, 5.5])
    refused = Record(id="t004", status=TrialStatus.INVALID, axes=failed.axes, reason="no room")
    stopped = make_sync_only(5, status=TrialStatus.CONTAMINATED, sync=None)
    return {
        "sent": sent,
        "sent on processes": [make_sync_only(index, **cpu) for index in (1, 0)],
        "sent and failed": [*sent, failed, hung, refused, stopped],
        "sent or trained": [*sent, make_synced(6), make_record(7)],
        "sent, trained or failed": [*sent, failed, make_synced(6), make_record(7)],
        "none sent": [failed, hung, stopped],
        "worlds of two sizes": [make_sync_only(0, world_size=1), make_sync_only(1, world_size=2)],
    }


SYNC_RUNS = _make_sync_runs()
"""Runs with trials that only sent their weights, in all company: columns come and go with it."""


def make_mixed_records() -> list[Record]:
    """Return a GPU sweep with every kind of end."""
    meshes = ["fsdp:d2", "fsdp:t2", "fsdp:c2"]
    points = list(itertools.product(meshes, (False, True), (False, True)))
    records = [
        make_record(
            index,
            axes={
                "parallel": mesh,
                "gradient_checkpointing": checkpointing,
                "fsdp.offload_params": offload,
                "mb_spec.max_tokens_per_mb": 4096,
            },
        )
        for index, (mesh, checkpointing, offload) in enumerate(points)
    ]
    axes = [record.axes for record in records]
    records[3] = records[3].model_copy(update={"unstable": True})
    records[5] = make_failed(5, TrialStatus.OOM, axes=axes[5])
    records[7] = make_failed(7, TrialStatus.OOM, axes=axes[7])
    records[8] = make_failed(8, TrialStatus.HANG, axes=axes[8], losses=[6.0, 5.5])
    records[9] = records[9].model_copy(update={"status": TrialStatus.CONTAMINATED})
    refused = {**axes[0], "parallel": "fsdp:t3"}
    reason = "parallel.tensor=3: must divide num_key_value_heads=8. Use 1, 2, 4 or 8."
    records.append(
        Record(id="t012", status=TrialStatus.INVALID, axes=refused, reason=reason, device="cuda")
    )
    return records


def write_run(path: Path, records: list[Record], num_samples: int = 60, ranks: int = 2) -> Path:
    """Write a run directory with these records; every started trial gets steps and samples."""
    folder = RunFolder(path)
    path.mkdir(parents=True, exist_ok=True)
    argv = ["fsdpbench", "sweep", "--axis", "parallel=fsdp:d2,fsdp:t2", "--out", str(path)]
    sweep = {"schema_version": 1, "argv": argv, "seed": 1, "created_at": "2026-11-30T03:00:00Z"}
    folder.sweep_path.write_text(json.dumps({**sweep, "model": "qwen3-0.6b"}))
    with folder.results_path.open("w") as file:
        file.writelines(encode(record) + "\n" for record in records)
    for index, record in enumerate(records):
        if record.status not in (TrialStatus.INVALID, TrialStatus.PRUNED):
            trial = folder.trial(record.id)
            trial.logs.mkdir(parents=True, exist_ok=True)
            write_steps(trial.steps_path, record)
            write_samples(trial.samples_path, index, num_samples, ranks, record.device == "cuda")
    return path


def write_steps(path: Path, record: Record) -> None:
    """Write a steps.jsonl with the record's losses."""
    with path.open("w") as file:
        for step, loss in enumerate(record.losses):
            line = {"step": step, "seconds": 0.4, "loss": loss, "grad_norm": 1.0}
            file.write(json.dumps({**line, "num_tokens": 8192, "warmup": step < 2}) + "\n")


def write_samples(path: Path, seed: int, num_samples: int, ranks: int, on_gpu: bool) -> None:
    """Write `num_samples` samples of every source and rank: a saw over a rising base."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for tick in range(num_samples):
            for rank in range(ranks):
                level = (8 + 10 * (tick % 12) / 12) * min(1.0, tick / 8) + rng.uniform(0, 0.3)
                shares = [("host", {"rss_bytes": int((1 + 0.1 * level) * GIB)})]
                if on_gpu:
                    allocated = int(level * GIB * (1 + 0.4 * rank))
                    reserved = {"allocated_bytes": allocated, "reserved_bytes": allocated + 2 * GIB}
                    shares.append(("allocator", {**reserved, "peak_allocated_bytes": allocated}))
                    shares.append(("nvml", {"used_bytes": allocated + 3 * GIB, "power_watts": 300}))
                for source, values in shares:
                    line = {"t": START + 0.5 * tick, "rank": rank, "source": source, **values}
                    file.write(json.dumps(line) + "\n")
