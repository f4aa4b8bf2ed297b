"""Hugging Face folders saved and loaded by real ranks."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from fsdpbench.engine.checkpoint.formats import load_checkpoint, save_checkpoint
from fsdpbench.engine.checkpoint.hf import divide_files, save_hf
from fsdpbench.engine.config.checkpoint import SaveLoadMeta
from fsdpbench.engine.models.export import iterate_full_parameters
from fsdpbench.errors import ConfigError
from tests.distributed.payloads.checkpoint_parts import build, fingerprint, step


def whole_weights(parts: Any) -> dict[str, Any]:
    """The weights on rank 0 as arrays; tensors would not survive their process."""
    named = iterate_full_parameters(parts.model, parts.meshes, parts.device)
    return {name: value.numpy().copy() for name, value in named if value is not None}


def step_and_save(rank: int, world_size: int, path: str, backend: str, folder: str) -> Any:
    """Return the weights, and how many files this rank had to write."""
    parts = build(backend, path)
    step(parts, 0)
    save_hf(parts, SaveLoadMeta(path=folder), 3, max_file_bytes=200_000)
    index = json.loads((Path(folder) / "model.safetensors.index.json").read_text())
    owners = divide_files(index["weight_map"], world_size)
    return whole_weights(parts), list(owners.values()).count(rank)


def save_with_optimizer(rank: int, world_size: int, backend: str, folder: str) -> dict[str, str]:
    parts = build(backend)
    step(parts, 0)
    save_checkpoint(parts, SaveLoadMeta(path=folder, with_optim=True), 4)
    step(parts, 1)
    save_checkpoint(parts, SaveLoadMeta(path=folder, with_optim=True), 5)
    return fingerprint(parts)


def load_with_optimizer(rank: int, world_size: int, backend: str, folder: str) -> dict[str, Any]:
    parts = build(backend, seed=11)
    version = load_checkpoint(parts, SaveLoadMeta(path=folder, with_optim=True))
    return {"version": version, **fingerprint(parts)}


def save_merged(rank: int, world_size: int, folder: str) -> Any:
    """Save a model with adapters as a folder and sharded; load the latter into another one."""
    lora = {"use_lora": True, "lora_rank": 4, "optimizer_dtype": "float32"}
    parts = build("fsdp:d2", "tiny-llama", **lora)
    for number in range(2):
        step(parts, number)
    save_checkpoint(parts, SaveLoadMeta(path=f"{folder}/hf"), 1)
    dcp = SaveLoadMeta(path=f"{folder}/dcp", weight_format="dcp", with_optim=True)
    save_checkpoint(parts, dcp, 1)
    saved, merged = fingerprint(parts), whole_weights(parts)
    for call in (load_checkpoint, partial(save_checkpoint, version=2)):
        try:
            call(parts, SaveLoadMeta(path=f"{folder}/hf", with_optim=True))
        except ConfigError as error:
            assert "set weight_format to dcp" in str(error)
        else:
            raise AssertionError("states of adapters went with merged weights")
    other = build("fsdp:d2", "tiny-llama", **lora, seed=13)
    load_checkpoint(other, dcp)
    return saved, merged, fingerprint(other)
