"""How fast checkpoints reach the disk and come back, beside the disk's own rates in the same run.

    torchrun --nproc-per-node 2 benchmarks/checkpoints.py --model qwen3-1.7b --backend fsdp:d2 \
        --folder /scratch --threads 1 4 8

Rank 0 prints one JSON object a measurement: seconds, GB/s and the share of the disk's rate. The
disk's rates are those of one plain file a rank, written with one fsync at its end and read from a
page cache that was told to forget it; writes are measured before and after the saves, since disks
waver. Loads start from a forgotten page cache, too. Weights are random, optimizer states are there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdpbench.engine.checkpoint.background import AsyncSaves
from fsdpbench.engine.checkpoint.dcp import (
    ROOT,
    WRITER_THREADS,
    build_manifest,
    build_state,
    write_checkpoint,
)
from fsdpbench.engine.checkpoint.formats import load_checkpoint, save_checkpoint
from fsdpbench.engine.config.checkpoint import SaveLoadMeta
from fsdpbench.engine.config.parallel import parse_backend
from fsdpbench.engine.config.tracing import PerfTracerConfig
from fsdpbench.engine.config.train import FinetuneSpec, TrainEngineConfig
from fsdpbench.engine.launch import join_process_group, leave_process_group
from fsdpbench.engine.parallel.mesh import build_meshes
from fsdpbench.engine.setup import EngineParts, build_parts
from fsdpbench.engine.tracing.tracer import build_tracer

CHUNK_BYTES = 16 << 20
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=100, train_batch_size=10)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-qwen3", help="preset or folder")
    parser.add_argument("--backend", default="fsdp:d1", help="degrees, as fsdp:d2t2")
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure")
    parser.add_argument("--threads", type=int, nargs="*", default=[WRITER_THREADS])
    parser.add_argument("--rounds", type=int, default=2)
    return parser.parse_args()


class Clock:
    """Times work of all ranks and prints its rate on rank 0."""

    def __init__(self, parts: EngineParts) -> None:
        self.group, self.leads = parts.meshes.cpu_group, parts.meshes.rank == 0
        self.synchronize = parts.device.synchronize
        self.disk: dict[str, float] = {}  # bytes per second of the last plain write and read

    def time(self, call: Callable[[], Any]) -> float:
        """Return the seconds until the last rank is done."""
        self.synchronize()
        dist.barrier(group=self.group)
        started = time.perf_counter()
        call()
        dist.barrier(group=self.group)
        return time.perf_counter() - started

    def report(self, what: str, num_bytes: float, seconds: float, disk: str = "") -> float:
        """Print one measurement; return its bytes per second."""
        rate = num_bytes / seconds
        line: dict[str, Any] = {"what": what, "seconds": round(seconds, 3)}
        line |= {
            "gigabytes": round(num_bytes / 1e9, 3),
            "gigabytes_per_second": round(rate / 1e9, 3),
        }
        if disk:
            line["share_of_disk"] = round(rate / self.disk[disk], 2)
        if self.leads:
            print(json.dumps(line), flush=True)
        return rate


def write_plain(file: Path, num_bytes: int) -> None:
    """Write a file and wait until it is on the disk."""
    chunk = os.urandom(CHUNK_BYTES)
    with file.open("wb", buffering=0) as target:
        for _ in range(-(-num_bytes // CHUNK_BYTES)):
            target.write(chunk)
        os.fsync(target.fileno())


def read_plain(file: Path) -> None:
    """Read a file and keep nothing."""
    memory = bytearray(CHUNK_BYTES)
    with file.open("rb", buffering=0) as source:
        while source.readinto(memory):
            pass


def forget_pages(folder: Path) -> None:
    """Drop the files below a folder from the page cache; they are on the disk already."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def measure_disk(clock: Clock, folder: Path, num_bytes: int) -> None:
    """Measure plain writing and reading; `num_bytes` over all ranks together."""
    share = max(CHUNK_BYTES, num_bytes // dist.get_world_size(clock.group))
    total = -(-share // CHUNK_BYTES) * CHUNK_BYTES * dist.get_world_size(clock.group)
    file = folder / f"plain{dist.get_rank(clock.group)}"
    clock.disk["write"] = clock.report(
        "disk write", total, clock.time(lambda: write_plain(file, share))
    )
    forget_pages(folder)
    clock.disk["read"] = clock.report("disk read", total, clock.time(lambda: read_plain(file)))
    file.unlink()


def size_of(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def measure_format(clock: Clock, parts: EngineParts, meta: SaveLoadMeta) -> None:
    """Save and load once."""
    folder = Path(meta.path)
    seconds = clock.time(lambda: save_checkpoint(parts, meta, 1))
    what = f"{meta.weight_format}{' with optimizer' if meta.with_optim else ''}"
    clock.report(f"save {what}", size_of(folder), seconds, "write")
    if clock.leads:
        forget_pages(folder)
    seconds = clock.time(lambda: load_checkpoint(parts, meta))
    clock.report(f"load {what}", size_of(folder), seconds, "read")


def measure_threads(clock: Clock, parts: EngineParts, path: Path, num_threads: int) -> None:
    """Save sharded with a number of threads a rank."""
    meta = SaveLoadMeta(path=str(path), weight_format="dcp", with_optim=True)
    content = {ROOT: build_state(parts)}
    manifest = build_manifest(parts, meta, 1)
    group = parts.meshes.cpu_group
    seconds = clock.time(
        lambda: write_checkpoint(content, path, manifest, group, num_threads=num_threads)
    )
    clock.report(f"save dcp with {num_threads} threads", size_of(path), seconds, "write")


def measure_background(clock: Clock, parts: EngineParts, path: Path) -> None:
    """Save in the background: how long training stands still, and how long all of it takes."""
    meta = SaveLoadMeta(path=str(path), weight_format="dcp", with_optim=True, asynchronous=True)
    saves = AsyncSaves()
    copying = clock.time(lambda: saves.save(parts, meta, 1))
    writing = clock.time(saves.wait)
    clock.report("copy for a background save", size_of(path), copying)
    clock.report("background save, copy included", size_of(path), copying + writing, "write")
    saves.close()


def main() -> None:
    """Measure everything in turn, some rounds."""
    arguments = parse_arguments()
    device, _ = join_process_group()
    config = TrainEngineConfig(
        path=arguments.model,
        backend=arguments.backend,
        init_from_scratch=True,
        optimizer={"type": "adam", "lr": 1e-5},
    )
    meshes = build_meshes(parse_backend(config.backend).strategy, device.type)
    tracer = build_tracer(PerfTracerConfig(), meshes.rank, device)
    parts = build_parts(config, SPEC, device, meshes, tracer)
    clock = Clock(parts)
    folder: Path = arguments.folder / f"checkpoints-{meshes.world_size}-ranks"
    if clock.leads:
        folder.mkdir(parents=True)
    dist.barrier(group=meshes.cpu_group)
    num_bytes = 3 * sum(p.shape.numel() for p in parts.model.parameters()) * torch.float32.itemsize
    try:
        for _ in range(arguments.rounds):
            measure_disk(clock, folder, num_bytes)
            for num_threads in arguments.threads:
                measure_threads(clock, parts, folder / "dcp", num_threads)
            for values in (
                {"weight_format": "dcp", "with_optim": True},
                {"weight_format": "hf"},
            ):
                path = str(folder / values["weight_format"])
                measure_format(clock, parts, SaveLoadMeta(path=path, **values))
            measure_background(clock, parts, folder / "dcp")
            measure_disk(clock, folder, num_bytes)
    finally:
        dist.barrier(group=meshes.cpu_group)
        if clock.leads:
            shutil.rmtree(folder)
    meshes.destroy()
    leave_process_group()


if __name__ == "__main__":
    main()
