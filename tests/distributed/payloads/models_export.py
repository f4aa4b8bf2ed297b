"""Saving and reloading sharded policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fsdpbench.engine.models.export import iterate_full_parameters, load_hf, save_hf
from fsdpbench.engine.models.load import resolve_path
from fsdpbench.engine.parallel.regions import local_shard
from tests.distributed.payloads.parallel_policy import (
    DEVICE,
    LENGTHS,
    build_config,
    build_policy,
    make_batch,
    run_policy,
)


def train_and_save(
    rank: int, world_size: int, path: str, backend: str, folder: str
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """One plain gradient step, a save, and the logprobs of the model that was saved."""
    config = build_config(path, backend)
    model, meshes = build_policy(config)
    batch = make_batch(model.facts.vocab_size)
    run_policy(model, meshes, batch, [0, 2])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.05 * parameter.grad
        logprobs = run_policy(model, meshes, batch, [4])
    save_hf(
        model,
        folder,
        meshes,
        DEVICE,
        source=resolve_path(config),
        dtype=torch.float32,
        max_file_bytes=200_000,
    )
    seen = (Path(folder) / "config.json").is_file()
    return batch["input_ids"][4, : LENGTHS[4]], torch.roll(logprobs, -1), seen


def save_change_and_load(
    rank: int, world_size: int, backend: str, folder: str
) -> tuple[bool, bool]:
    config = build_config("tiny-qwen3", backend)
    model, meshes = build_policy(config)
    source = resolve_path(config)
    save_hf(model, folder, meshes, DEVICE, source=source, dtype=torch.float32)
    shards = [local_shard(parameter) for parameter in model.parameters()]
    before = [shard.clone() for shard in shards]
    for shard in shards:
        shard.add_(1.0)
    changed = not any(torch.equal(shard, old) for shard, old in zip(shards, before, strict=True))
    load_hf(model, folder)
    restored = all(torch.equal(shard, old) for shard, old in zip(shards, before, strict=True))
    return changed, restored


def iterate(rank: int, world_size: int, backend: str) -> dict[str, Any]:
    model, meshes = build_policy(build_config("tiny-qwen3", backend))
    tensors = dict(iterate_full_parameters(model, meshes, DEVICE, torch.bfloat16))
    embedding = tensors["model.embed_tokens.weight"]
    shown = None
    if embedding is not None:
        shown = (tuple(embedding.shape), str(embedding.dtype), embedding.device.type)
    return {"names": list(tensors), "embedding": shown}
