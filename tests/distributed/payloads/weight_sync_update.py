"""Trainers of several ranks and rollout processes: updates that arrive, and updates that fail."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from fsdpbench.engine.config.weight_sync import WeightUpdateMeta
from fsdpbench.engine.models.export import iterate_gathered_parameters
from fsdpbench.engine.weight_sync.buckets import StageMap, split_stages
from fsdpbench.engine.weight_sync.digests import compute_digests
from fsdpbench.engine.weight_sync.fanout import THREAD_NAME
from fsdpbench.engine.weight_sync.records import ReceiverTraits
from fsdpbench.engine.weight_sync.source import (
    SourceModel,
    describe_source,
    iterate_whole_tensors,
)
from fsdpbench.engine.weight_sync.update import UpdaterState, WeightUpdater
from fsdpbench.errors import FsdpbenchError
from tests.distributed.payloads.checkpoint_parts import build, step
from tests.distributed.payloads.parallel_policy import DEVICE
from tests.distributed.receiver_processes import ReceiverProcess, write_weights

META = {"wire_dtype": "bfloat16", "weight_chunked_mem_mb": 1, "verify": True}


@contextmanager
def receivers(source: SourceModel, faults: list[str], rank: int, **traits: Any) -> Iterator[Any]:
    """Receiver processes on rank 0, none elsewhere; all are ended."""
    size = traits.get("pipeline_size", 1)
    stages = split_stages(source.specs, StageMap(source.num_layers, size, is_tied=source.is_tied))
    merits = ReceiverTraits("local", **{"gives_digests": True, **traits})
    made = [] if rank else [ReceiverProcess(list(map(list, stages)), merits, f) for f in faults]
    try:
        yield made
    finally:
        for one in made:
            one.close()


def sharded(
    rank: int,
    world_size: int,
    backend: str,
    path: str,
    meta: dict[str, Any],
    traits: dict[str, Any],
    adapters_only: bool = False,
    **fields: Any,
) -> dict[str, Any] | None:
    """Train a step, update two receivers, twice; compare what lies there with the whole weights."""
    parts = build(backend, path, **fields)
    model = parts.model
    facts = model.facts
    named: Callable[[], Any] = (
        model.named_adapter_parameters if adapters_only else model.named_hf_parameters
    )
    wire = meta.get("wire_dtype", "bfloat16")
    dtype = getattr(torch, wire)
    source = describe_source(
        named(),
        wire,
        num_layers=facts.num_layers,
        is_tied=facts.tie_word_embeddings,
        adapters_only=adapters_only,
    )

    def walk() -> Any:
        if model.adapters and not adapters_only:
            return iterate_gathered_parameters(model, DEVICE, dtype)
        return iterate_whole_tensors(named(), DEVICE, dtype)

    with receivers(source, ["", ""], rank, **traits) as engines:
        group = parts.meshes.cpu_group
        updater = WeightUpdater(
            engines,
            WeightUpdateMeta(**{**META, **meta}, timeout_seconds=30),
            source,
            DEVICE,
            group=group,
        )
        updater.connect()
        timings = []
        for version in (1, 2):
            step(parts, version)
            timings.append(updater.update(version, walk))
        wanted = compute_digests((name, whole.to(dtype)) for name, whole in walk())
        found = [engine.ask("digests") for engine in engines]
        states = [engine.ask("state") for engine in engines]
        updater.close()
    if rank:
        return None
    merged = [{k: v for stage in there for k, v in stage.items()} for there in found]
    return {
        "equal": [there == wanted for there in merged],
        "stages": [list(stage) for stage in found[0]],
        "states": [(state["version"], state["paused"]) for state in states],
        "timings": [t.to_json() for t in timings],
        "num_buckets": len({t.num_buckets for t in timings}),
    }


def tiny_source(
    num_tensors: int, shape: tuple[int, int]
) -> tuple[SourceModel, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    tensors = {
        f"model.layers.{index}.w": torch.randn(shape, generator=generator)
        for index in range(num_tensors)
    }
    return describe_source(tensors.items(), "float32", num_layers=num_tensors), tensors


def failing(
    rank: int, world_size: int, faults: list[str], meta: dict[str, Any], folder: str = ""
) -> dict[str, Any]:
    """Two ranks train; receivers commit faults; return how it ended, and how it went on."""
    source, tensors = tiny_source(6, (500, 400))  # a bucket holds one tensor
    group = dist.group.WORLD

    def publish(version: int) -> Path:
        target = Path(folder) / f"v{version:08d}"
        if rank == 0:
            target.mkdir(parents=True)
            write_weights(target, tensors.items())
        dist.barrier()
        return target

    def bounded(updater: WeightUpdater) -> Any:
        began = time.monotonic()
        try:
            outcome: Any = updater.update(1, lambda: iter(tensors.items())).mode
        except FsdpbenchError as error:
            outcome = f"{type(error).__name__}: {error}"
        return outcome, time.monotonic() - began

    settings = {**META, "wire_dtype": "float32", **meta}
    with receivers(source, faults, rank) as engines:
        updater = WeightUpdater(
            engines,
            WeightUpdateMeta(**settings, path=folder or None),
            source,
            DEVICE,
            group=group,
            publish=publish if folder else None,
        )
        outcome, seconds = bounded(updater)
        state = updater.state is UpdaterState.CONNECTED
        alive = [engine for engine in engines if engine.is_alive()]
        states = [e.ask("state") for e in alive if "hang" not in faults[engines.index(e)]]
        updater.close()
    return {
        "outcome": outcome,
        "seconds": seconds,
        "connected": state,
        "mode": updater.mode,
        "states": [(s["version"], s["paused"]) for s in states],
    }


def many(rank: int, world_size: int, count: int) -> dict[str, Any]:
    """Update one receiver `count` times; return what grew between the first tenth and the end."""
    source, tensors = tiny_source(3, (64, 50))
    with receivers(source, [""], rank) as engines:
        meta = WeightUpdateMeta(
            wire_dtype="float32", weight_chunked_mem_mb=1, verify=True, timeout_seconds=30
        )
        updater = WeightUpdater(engines, meta, source, DEVICE)
        updater.connect()
        own = psutil.Process()
        other = psutil.Process(engines[0].pid)

        def measure() -> dict[str, float]:
            gc.collect()
            for thread in threading.enumerate():
                if thread.name == THREAD_NAME:  # it has told its outcome and is about to end
                    thread.join(10)
            return {
                "handles": own.num_fds() + other.num_fds(),
                "threads": own.num_threads() + other.num_threads(),
                "bytes": own.memory_info().rss + other.memory_info().rss,
            }

        seconds = []
        for version in range(1, count + 1):
            began = time.perf_counter()
            updater.update(version, lambda: iter(tensors.items()))
            seconds.append(time.perf_counter() - began)
            if version == count // 10:
                before = measure()
        after = measure()
        version = engines[0].get_version()
        updater.close()
    tenth = count // 10
    return {
        "version": version,
        "growth": {key: after[key] - before[key] for key in before},
        "early_seconds": sorted(seconds[tenth : 2 * tenth])[tenth // 2],
        "late_seconds": sorted(seconds[-tenth:])[tenth // 2],
        "total_seconds": sum(seconds),
        "pid": os.getpid(),
    }
