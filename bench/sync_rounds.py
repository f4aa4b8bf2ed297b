"""The end of a trial that sends weights: receivers, limits, rounds, proof, in this order.

    rank 0      start receivers | measure the wire | connect | cold, warm-up, steady ... | log-probs
    all ranks                                        connect | take part in each round   | log-probs

Receivers begin without weights, so what they answer at the end has come through the channel.
Whatever happens, they are gone when `run_sync` returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from fsdpbench.bench.folders import TrialFolder
from fsdpbench.bench.records import TrialSpec, WorkloadSpec
from fsdpbench.bench.sync_limits import measure_broadcast, measure_disk
from fsdpbench.bench.sync_plan import place_receivers
from fsdpbench.bench.sync_record import (
    SyncRecord,
    SyncRound,
    SyncSeconds,
    name_round,
    share_of_disk_limit,
    share_of_limit,
    summarise_rounds,
)
from fsdpbench.engine.config.weight_sync import WeightUpdateMeta
from fsdpbench.engine.fsdp_engine import FSDPEngine
from fsdpbench.engine.parallel.agreement import Agreement
from fsdpbench.engine.rollout.local import LocalEngine, LocalSettings, launch_local_engines
from fsdpbench.engine.weight_sync.disk import list_files, list_versions
from fsdpbench.engine.weight_sync.timings import UpdateTimings
from fsdpbench.errors import WeightSyncError

PROMPT_TOKENS = 64
LOGPROB_LIMITS = {"float32": 5e-3, "float16": 0.1, "bfloat16": 0.5}
"""Two implementations of one model differ by the rounding of their activations, not by more."""
MAX_TIMEOUT_SECONDS = 300.0
HANG_SHARE = 0.8  # of the watchdog's patience, so that an exchange gives up before it and says why

Enter = Callable[[str, int | None], None]


@dataclass(frozen=True)
class Footprint:
    """What the processes of the updates hold."""

    host_bytes: int
    device_bytes: int
    handles: int


def run_sync(engine: FSDPEngine, spec: TrialSpec, folder: TrialFolder, enter: Enter) -> SyncRecord:
    """Send the weights as the workload says. Collective over: the world.

    `enter` is told of each part, with the round's number. The same record on all ranks but for
    what only rank 0 knows.
    """
    meta = plan_meta(spec, folder)
    leads = engine.meshes.rank == 0
    receivers: list[LocalEngine] = []
    with ExitStack() as stack:
        enter("receivers", None)
        with Agreement("starting the rollout processes", engine.cpu_group):
            if leads:
                receivers += launch_local_engines(plan_receivers(engine, spec, meta))
                for receiver in receivers:
                    stack.callback(receiver.close)
        enter("sync_limits", None)
        limits: dict[str, float] = {}
        with Agreement("measuring the limits", engine.cpu_group):
            if leads and meta.type == "xccl":
                limits["broadcast"] = measure_broadcast(
                    receivers, engine.device, meta.timeout_seconds
                )
        enter("weight_sync", None)
        began = time.perf_counter()
        stack.callback(engine.disconnect_engine)  # before the receivers go
        engine.connect_engine(receivers, meta)
        connect_seconds = time.perf_counter() - began
        timings, growth = update_repeatedly(engine, spec.workload, receivers, enter)
        enter("weight_sync_proof", None)
        error = verify_logprobs(engine, receivers) if spec.workload.sync_verify else None
        num_bytes = timings[-1].num_bytes
        with Agreement("measuring the limits", engine.cpu_group):
            if leads and meta.path is not None:
                num_bytes = measure_folder(Path(meta.path))
                rates = measure_disk(Path(meta.path) / "plain", num_bytes)
                limits["write"], limits["read"] = rates
    return build_record(
        meta,
        timings,
        limits,
        receiver_devices=[receiver.settings.device for receiver in receivers],
        bytes=num_bytes,
        connect_seconds=connect_seconds,
        verified=spec.workload.sync_verify,
        logprob_error=error,
        **growth,
    )


def plan_meta(spec: TrialSpec, folder: TrialFolder) -> WeightUpdateMeta:
    """Return the settings of the updates; they give up before the runner does."""
    mode = spec.config.get("weight_update_mode", "xccl")
    return WeightUpdateMeta(
        type=mode,
        path=str(folder.weights) if mode == "disk" else None,
        weight_chunked_mem_mb=spec.workload.sync_bucket_mb,
        wire_dtype=spec.config.get("dtype", "bfloat16"),
        verify=spec.workload.sync_verify,
        timeout_seconds=min(MAX_TIMEOUT_SECONDS, HANG_SHARE * spec.hang_seconds),
        keep_versions=1,
    )


def plan_receivers(
    engine: FSDPEngine, spec: TrialSpec, meta: WeightUpdateMeta
) -> list[LocalSettings]:
    """Return how each receiver is started: with the trainer's model and no weights."""
    num_gpus = torch.cuda.device_count()
    count = spec.workload.sync_receivers
    return [
        LocalSettings(
            path=str(engine.parts.source),
            dtype=meta.wire_dtype,
            device=device,
            version=None,
            timeout_seconds=meta.timeout_seconds,
            title=f"receiver {index}",
        )
        for index, device in enumerate(
            place_receivers(spec.device, spec.world_size, count, num_gpus)
        )
    ]


def update_repeatedly(
    engine: FSDPEngine, workload: WorkloadSpec, receivers: Sequence[LocalEngine], enter: Enter
) -> tuple[list[UpdateTimings], dict[str, int]]:
    """Make all rounds; return their timings and what grew after the warm-up.

    Collective over: the world.
    """
    timings: list[UpdateTimings] = []
    before = measure_footprint(engine, receivers)
    for index in range(workload.sync_rounds + 2):
        enter("weight_sync", index)
        engine.set_version(index + 1)
        timings.append(engine.update_weights())
        if index == 1:
            before = measure_footprint(engine, receivers)
    after = measure_footprint(engine, receivers)
    return timings, {
        "host_growth_bytes": after.host_bytes - before.host_bytes,
        "device_growth_bytes": after.device_bytes - before.device_bytes,
        "handle_growth": after.handles - before.handles,
    }


def measure_footprint(engine: FSDPEngine, receivers: Sequence[LocalEngine]) -> Footprint:
    """Return what this process and the receivers hold now. Local."""
    processes = [psutil.Process(), *(psutil.Process(receiver.pid) for receiver in receivers)]
    return Footprint(
        host_bytes=sum(process.memory_info().rss for process in processes),
        device_bytes=engine.get_device_stats().reserved_bytes,
        handles=sum(process.num_fds() for process in processes),
    )


def verify_logprobs(engine: FSDPEngine, receivers: Sequence[LocalEngine]) -> float | None:
    """Compare each receiver's log-probs on a fixed prompt with the trainer's; None off rank 0.

    Raises WeightSyncError when they differ by more than rounding. Collective over: the world.
    """
    tokens = plan_prompt(engine.model_facts.vocab_size)
    batch = {
        "input_ids": torch.tensor([tokens]),
        "attention_mask": torch.ones(1, len(tokens), dtype=torch.bool),
    }
    own = engine.forward_batch(batch)[0, 1 : len(tokens)].double().cpu()
    worst: float | None = None
    with Agreement("comparing log-probs", engine.cpu_group):
        for receiver in receivers:
            (told,) = receiver.compute_logprobs([tokens])
            error = float((torch.tensor(told, dtype=torch.float64) - own).abs().max())
            limit = LOGPROB_LIMITS[receiver.settings.dtype]
            if not error <= limit:  # NaN, too
                raise WeightSyncError(
                    f"{receiver.settings.title}: its log-probs differ from the trainer's by "
                    f"{error:.3g} on a fixed prompt; {limit:g} is allowed for "
                    f"{receiver.settings.dtype}. It does not compute with the weights sent."
                )
            worst = error if worst is None else max(worst, error)
    return worst


def plan_prompt(vocab_size: int) -> list[int]:
    """Return the fixed prompt: tokens from all over the vocabulary."""
    return [(13 + 7919 * index) % vocab_size for index in range(PROMPT_TOKENS)]


def measure_folder(path: Path) -> int:
    """Return the bytes of the weights in the newest version."""
    sizes = list_files(list_versions(path)[-1])
    return sum(size for name, size in sizes.items() if name.endswith(".safetensors"))


def build_round(index: int, timings: UpdateTimings) -> SyncRound:
    """Return a round as the record keeps it."""
    seconds = {name: getattr(timings, name) for name in SyncSeconds.model_fields}
    if timings.mode == "disk":
        seconds["transfer_seconds"] = timings.write_seconds + timings.apply_seconds
    return SyncRound(kind=name_round(index), **seconds)


def build_record(
    meta: WeightUpdateMeta,
    timings: Sequence[UpdateTimings],
    limits: dict[str, float],
    **known: Any,
) -> SyncRecord:
    """Put medians, bandwidth and shares beside what is `known`."""
    rounds = [build_round(index, entry) for index, entry in enumerate(timings)]
    medians = SyncSeconds(**summarise_rounds(rounds))
    num_bytes, seconds = known["bytes"], medians.transfer_seconds
    write, read = limits.get("write"), limits.get("read")
    return SyncRecord(
        mode=meta.type,
        receivers=len(known["receiver_devices"]),
        num_buckets=timings[-1].num_buckets,
        rounds=rounds,
        bandwidth_bytes_per_second=num_bytes / seconds if seconds > 0 else None,
        broadcast_limit_bytes_per_second=limits.get("broadcast"),
        share_of_broadcast_limit=share_of_limit(num_bytes, seconds, limits.get("broadcast")),
        disk_write_bytes_per_second=write,
        disk_read_bytes_per_second=read,
        share_of_disk_limit=share_of_disk_limit(medians, num_bytes, write, read),
        **known,
        **medians.model_dump(),
    )
