"""First values of adapters on meshes, and adapters that leave and come back as folders."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import torch

from fsdpbench.engine.checkpoint.adapter_folder import load_adapter, save_adapter
from fsdpbench.engine.checkpoint.hf import load_hf, save_hf
from fsdpbench.engine.config.checkpoint import SaveLoadMeta
from fsdpbench.engine.models.heads import PolicyModel
from fsdpbench.engine.models.load import resolve_path
from fsdpbench.engine.parallel.adapter_values import draw_factor
from fsdpbench.engine.parallel.regions import local_shard, plan_local_region
from fsdpbench.errors import FsdpbenchError
from tests.distributed.payloads.lora_training import build_adapted, gather_adapters
from tests.distributed.payloads.parallel_policy import (
    DEVICE,
    LENGTHS,
    build_config,
    build_policy,
    make_batch,
    run_policy,
)


def digest(rank: int, world_size: int, backend: str, seed: int = 7) -> str:
    """Hash of the first values of all adapters; empty but on rank 0."""
    _, model, meshes = build_adapted("tiny-llama", backend, seed=seed)
    fingerprint = hashlib.sha256()
    for name, tensor in gather_adapters(model, meshes).items():
        fingerprint.update(name.encode() + tensor.numpy().tobytes())
    meshes.destroy()
    return "" if rank else fingerprint.hexdigest()


def build_parts(backend: str, **fields: Any) -> SimpleNamespace:
    """What saving and loading read of an engine's parts; weights come from the preset's files."""
    fields = {"init_from_scratch": False, **fields}
    config, model, meshes = build_adapted("tiny-qwen3", backend, **fields)
    source = resolve_path(config)
    return SimpleNamespace(
        config=config, model=model, meshes=meshes, device=DEVICE, source=source, optimizer=None
    )


def randomize(model: PolicyModel) -> None:
    for name, parameter in model.named_adapter_parameters():
        whole = draw_factor(99, name, parameter.shape, "cpu")
        local_shard(parameter).copy_(whole[plan_local_region(parameter)])


def save(rank: int, world_size: int, backend: str, folder: str) -> dict[str, Any]:
    """Save random adapters; return what the model says with them and where its base lies."""
    parts = build_parts(backend)
    randomize(parts.model)
    save_adapter(parts, SaveLoadMeta(path=folder, weight_format="adapter"), version=5)
    batch = make_batch(parts.model.facts.vocab_size)
    with torch.no_grad():
        logprobs = run_policy(parts.model, parts.meshes, batch, [4])
    parts.meshes.destroy()
    return {
        "ids": batch["input_ids"][4, : LENGTHS[4]],
        "logprobs": torch.roll(logprobs, -1),
        "source": str(parts.source),
    }


def load(rank: int, world_size: int, backend: str, folder: str) -> dict[str, Any]:
    """Load into other adapters; return the largest difference from what was saved."""
    parts = build_parts(backend)
    before = gather_adapters(parts.model, parts.meshes)
    errors = []
    for path in (f"{folder}-absent", folder):
        meta = SaveLoadMeta(path=path, weight_format="adapter")
        try:
            version = load_adapter(parts, meta)
        except FsdpbenchError as error:
            errors.append(f"{type(error).__name__}: {error}")
    found = gather_adapters(parts.model, parts.meshes)
    parts.meshes.destroy()
    wanted = {name: draw_factor(99, name, tensor.shape, "cpu") for name, tensor in found.items()}
    return {
        "version": version,
        "errors": errors,
        "changed": [name for name in found if not torch.equal(found[name], before[name])],
        "wrong": [name for name in found if not torch.equal(found[name], wanted[name])],
    }


def save_merged(rank: int, world_size: int, backend: str, folder: str) -> dict[str, Any]:
    """Save merged weights, load them back: the model must say the same, without adapters."""
    parts = build_parts(backend)
    randomize(parts.model)
    batch = make_batch(parts.model.facts.vocab_size)
    logprobs = []
    meta = SaveLoadMeta(path=folder)
    for call in (lambda: None, lambda: save_hf(parts, meta, 3), lambda: load_hf(parts, meta)):
        call()
        with torch.no_grad():
            logprobs.append(run_policy(parts.model, parts.meshes, batch, [4]))
        parts.model.reshard()
    b = [p for name, p in parts.model.named_adapter_parameters() if ".lora_B." in name]
    zero = not any(local_shard(parameter).any() for parameter in b)
    parts.meshes.destroy()
    return {
        "ids": batch["input_ids"][4, : LENGTHS[4]],
        "logprobs": [torch.roll(values, -1) for values in logprobs],
        "zero": zero,
    }


def refuse_without_adapters(rank: int, world_size: int, folder: str) -> str:
    model, meshes = build_policy(build_config("tiny-llama", "fsdp:d1"))
    parts = SimpleNamespace(model=model, meshes=meshes)
    try:
        save_adapter(parts, SaveLoadMeta(path=folder, weight_format="adapter"), version=0)
    except FsdpbenchError as error:
        return str(error)
    return ""
