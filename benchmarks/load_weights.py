"""How fast weights reach the shards, beside what the disk gives in the same run.

    torchrun --nproc-per-node 2 benchmarks/load_weights.py --model qwen3-1.7b --backend fsdp:d2 \
        --mode broadcast --cold

Rank 0 prints one JSON object. `limit` is threads that read the same files into a buffer each and do
nothing else. With --cold both start from a page cache without the files. Host growth is the highest
anonymous resident memory and the page-locked memory of torch's allocator against the moment before
shards are allocated; the worst rank besides 0 is given as `others`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdpbench.engine.config.parallel import parse_backend
from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.device import Device
from fsdpbench.engine.launch import join_process_group, leave_process_group
from fsdpbench.engine.models.load import build_meta_model, resolve_path
from fsdpbench.engine.parallel.materialize import allocate_shards, load_folder
from fsdpbench.engine.parallel.mesh import build_meshes
from fsdpbench.engine.parallel.parallelize import parallelize_model
from fsdpbench.engine.parallel.regions import local_shard
from fsdpbench.engine.parallel.weight_files import find_tensors
from fsdpbench.log import configure_logging

CHUNK_BYTES = 8 << 20
NUM_THREADS = 8


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-0.6b", help="preset or folder")
    parser.add_argument("--backend", default="fsdp:d1", help="degrees, as fsdp:d2t2")
    parser.add_argument("--mode", choices=["read", "broadcast"], default="read")
    parser.add_argument("--offload", action="store_true", help="shards rest in host memory")
    parser.add_argument("--cold", action="store_true", help="forget cached file pages first")
    parser.add_argument("--rounds", type=int, default=2)
    return parser.parse_args()


def forget_pages(files: list[Path]) -> None:
    """Drop the files from the page cache; works for pages that are on the disk already."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def measure_limit(files: list[Path]) -> float:
    """Return bytes per second of threads that read all files and keep nothing."""
    buffers = threading.local()

    def read(job: tuple[int, int]) -> int:
        if not hasattr(buffers, "memory"):
            buffers.memory = bytearray(CHUNK_BYTES)
        return os.preadv(job[0], [buffers.memory], job[1])

    descriptors = [os.open(file, os.O_RDONLY) for file in files]
    jobs = [
        (descriptor, start)
        for descriptor, file in zip(descriptors, files, strict=True)
        for start in range(0, file.stat().st_size, CHUNK_BYTES)
    ]
    started = time.perf_counter()
    try:
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            num_bytes = sum(pool.map(read, jobs))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return num_bytes / (time.perf_counter() - started)


def read_host_bytes(device: Device) -> int:
    """Return anonymous resident bytes, and page-locked ones that torch's allocator holds."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (anonymous,) = [int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")]
    statistics = getattr(device.module, "host_memory_stats", dict)()
    return anonymous + int(statistics.get("allocated_bytes.current", 0))


@contextmanager
def watch_host(device: Device) -> Iterator[dict[str, int]]:
    """Keep the highest growth of host memory within the block."""
    found, stop = {"growth": 0}, threading.Event()
    before = read_host_bytes(device)

    def watch() -> None:
        while not stop.wait(0.005):
            found["growth"] = max(found["growth"], read_host_bytes(device) - before)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join(10)


def load_once(
    arguments: argparse.Namespace, config: TrainEngineConfig, source: Path, device: Device
) -> dict[str, Any]:
    """Build a model, load it, and return this rank's figures."""
    strategy = parse_backend(config.backend).strategy
    meshes = build_meshes(strategy, device.type)
    model = build_meta_model(config, source)
    parallelize_model(model, config, meshes, device)
    dist.barrier(group=meshes.cpu_group)
    before = device.memory_stats().allocated_bytes
    device.reset_peaks()
    with watch_host(device) as host:
        started = time.perf_counter()
        allocate_shards(model, device, in_host_memory=arguments.offload)
        device.synchronize()
        allocated = time.perf_counter()
        load_folder(model, source, meshes, device, broadcast=arguments.mode == "broadcast")
        dist.barrier(group=meshes.cpu_group)
        ended = time.perf_counter()
    figures = {
        "allocate_seconds": allocated - started,
        "load_seconds": ended - allocated,
        "host_growth_bytes": host["growth"],
        "device_growth_bytes": device.memory_stats().peak_allocated_bytes - before,
        "shard_bytes": sum(local_shard(p).nbytes for p in model.parameters()),
    }
    del model
    gc.collect()
    meshes.destroy()
    device.empty_cache()
    return figures


def measure_round(
    arguments: argparse.Namespace, config: TrainEngineConfig, source: Path, device: Device
) -> dict[str, Any] | None:
    """Measure limit and load one after the other; the report on rank 0, None elsewhere."""
    files = sorted(set(find_tensors(source).values()))
    num_bytes = sum(file.stat().st_size for file in files)
    limit = 0.0
    if dist.get_rank() == 0:
        if arguments.cold:
            forget_pages(files)
        limit = measure_limit(files)
        if arguments.cold:
            forget_pages(files)
    own = load_once(arguments, config, source, device)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    if dist.get_rank() != 0:
        return None
    rate = num_bytes / max(rank["load_seconds"] for rank in ranks)
    others = [rank["host_growth_bytes"] - rank["shard_bytes"] for rank in ranks[1:]]
    return {
        "model": arguments.model,
        "backend": arguments.backend,
        "mode": arguments.mode,
        "offload": arguments.offload,
        "cold": arguments.cold,
        "device": device.type,
        "file_bytes": num_bytes,
        **own,
        "gigabytes_per_second": round(rate / 1e9, 3),
        "limit_gigabytes_per_second": round(limit / 1e9, 3),
        "share_of_limit": round(rate / limit, 3),
        "others_host_growth_beyond_shard_bytes": max(others, default=None),
    }


def main() -> None:
    """Measure the rounds and print one line each."""
    arguments = parse_arguments()
    device, _ = join_process_group()
    configure_logging(dist.get_rank())
    fields = {"fsdp": {"offload_params": arguments.offload}}
    if not device.is_asynchronous:
        fields["dtype"] = "float32"  # type: ignore[assignment]
    config = TrainEngineConfig(
        path=arguments.model, backend=arguments.backend, attn_impl="sdpa", **fields
    )
    source = resolve_path(config)  # writes a preset's weights at first
    for _ in range(arguments.rounds):
        report = measure_round(arguments, config, source, device)
        if report is not None:
            print(json.dumps(report), flush=True)
    leave_process_group()


if __name__ == "__main__":
    main()
