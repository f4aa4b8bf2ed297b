"""Host memory of shards, and what a load takes of it besides."""

from __future__ import annotations

import ctypes
import gc
import json
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdpbench.engine.config.parallel import parse_backend
from fsdpbench.engine.device import Device
from fsdpbench.engine.host_memory import HostRegions
from fsdpbench.engine.models.load import build_meta_model
from fsdpbench.engine.parallel.host_shards import is_full_size, move_into_region
from fsdpbench.engine.parallel.materialize import allocate_shards, load_folder
from fsdpbench.engine.parallel.mesh import build_meshes
from fsdpbench.engine.parallel.parallelize import parallelize_model
from fsdpbench.engine.parallel.regions import local_shard
from tests.distributed.payloads.parallel_policy import (
    DEVICE,
    build_config,
    build_policy,
    make_batch,
    run_policy,
)


def move_shards(rank: int, world_size: int) -> tuple[bool, dict[str, bool]]:
    mesh = init_device_mesh("cpu", (world_size,))
    tensors = {
        "even": distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]),
        "short": distribute_tensor(torch.ones(3, 2), mesh, [Shard(0)]),
    }
    regions = HostRegions(DEVICE)
    before = {name: local_shard(t).data_ptr() for name, t in tensors.items()}
    moved = []
    for name, tensor in tensors.items():
        move_into_region(tensor, regions)
        shard = local_shard(tensor)
        moved.append(shard.data_ptr() != before[name] and float(shard.sum()) == 0.0)
    return all(moved), {name: is_full_size(tensor) for name, tensor in tensors.items()}


def lock_shards(rank: int, world_size: int) -> tuple[bool, bool, bool, bool]:
    """Whether shards are locked, stay where they are, and are unlocked with the model."""
    device = Device("cuda", 0)
    fields = {"attn_impl": "sdpa", "fsdp": {"offload_params": True}}
    config = build_config("tiny-llama", "fsdp:d1", **fields)
    model, meshes = build_policy(config, device)
    shards = {name: local_shard(p) for name, p in model.named_parameters()}
    locked = all(shard.is_pinned() for shard in shards.values())
    before = {name: shard.data_ptr() for name, shard in shards.items()}
    run_policy(model, meshes, make_batch(64), [0, 1])
    after = {name: local_shard(p).data_ptr() for name, p in model.named_parameters()}
    probe = shards["backbone.model.norm.weight"]
    same = bool((probe == 1.0).all())
    del model, shards
    gc.collect()
    return locked, before == after, same, not probe.is_pinned()


class AnonymousMemory:
    """Watches this process's anonymous resident bytes; within it, the highest growth is kept."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.growth_bytes = 0

    @staticmethod
    def read_bytes() -> int:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        (line,) = [line for line in lines if line.startswith("RssAnon:")]
        return int(line.split()[1]) << 10

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.growth_bytes = max(self.growth_bytes, self.read_bytes() - self._start_bytes)

    def __enter__(self) -> AnonymousMemory:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before would hide what is taken now
        self._start_bytes = self.read_bytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)


def write_model(folder: Path, config: dict[str, Any], bare: bool) -> int:
    """Write a checkpoint of repeated random numbers, in two files; return its bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if bare:
        return 0
    model = build_meta_model(build_config(str(folder), "fsdp:d1"), folder)
    noise = torch.randn(1 << 16).bfloat16()
    tensors = {}
    for name, parameter in model.named_hf_parameters():
        count = parameter.numel()
        tensors[name] = noise.repeat(-(-count // noise.numel()))[:count].view(parameter.shape)
    names = list(tensors)
    weight_map = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        save_file({name: tensors[name] for name in part}, folder / f"{number}.safetensors")
        weight_map.update(dict.fromkeys(part, f"{number}.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(tensor.nbytes for tensor in tensors.values())


def measure_growth(
    rank: int, world_size: int, folder: str, config: dict[str, Any], bucket_bytes: int
) -> dict[str, dict[str, int]]:
    """Anonymous memory that a load takes at its worst, by mode, beside the bytes of the shards."""
    own = Path(folder) / str(rank)
    total = write_model(own, config, bare=rank > 0)
    dist.barrier()
    measured = {}
    for mode in ("broadcast", "read"):
        run = build_config(str(own), f"fsdp:d{world_size}")
        meshes = build_meshes(parse_backend(run.backend).strategy, "cpu")
        model = build_meta_model(run, own)
        parallelize_model(model, run, meshes, DEVICE)
        source = own if mode == "broadcast" else own.with_name("0")
        with AnonymousMemory() as memory:
            allocate_shards(model, DEVICE)
            load_folder(
                model,
                source,
                meshes,
                DEVICE,
                broadcast=mode == "broadcast",
                bucket_bytes=bucket_bytes,
            )
        shards = sum(local_shard(p).nbytes for p in model.parameters())
        measured[mode] = {
            "growth": memory.growth_bytes,
            "shards": shards,
            "model": total,
        }
        del model
        gc.collect()
        meshes.destroy()
    return measured


def measure_device_peak(
    rank: int,
    world_size: int,
    folder: str,
    config: dict[str, Any],
    bucket_bytes: int,
    broadcast: bool,
) -> tuple[int, int]:
    """Peak of allocated device bytes above what was there before, and the bytes of the shards."""
    device = Device("cuda", rank)
    own = Path(folder) / "model"
    write_model(own, config, bare=False)
    run = build_config(str(own), f"fsdp:d{world_size}", attn_impl="sdpa")
    meshes = build_meshes(parse_backend(run.backend).strategy, "cuda")
    model = build_meta_model(run, own)
    parallelize_model(model, run, meshes, device)
    before = device.memory_stats().allocated_bytes
    device.reset_peaks()
    allocate_shards(model, device)
    load_folder(model, own, meshes, device, broadcast=broadcast, bucket_bytes=bucket_bytes)
    shards = sum(local_shard(p).nbytes for p in model.parameters())
    return device.memory_stats().peak_allocated_bytes - before, shards
