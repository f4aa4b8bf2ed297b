"""Shards and where their values come from."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from fsdpbench.engine.models.heads import PolicyModel
from fsdpbench.engine.models.load import build_meta_model, resolve_path
from fsdpbench.engine.parallel.full_tensors import gather_full_tensor
from fsdpbench.engine.parallel.materialize import (
    fill_from_folder,
    fill_parameters,
    fsdp2_load_full_state_dict,
)
from fsdpbench.engine.parallel.regions import Region, local_shard, shape_of
from fsdpbench.errors import CheckpointError
from tests.distributed.payloads.parallel_policy import DEVICE, build_config, build_policy


def gather_all(model: PolicyModel) -> dict[str, torch.Tensor]:
    return {n: gather_full_tensor(p, torch.device("cpu")) for n, p in model.named_hf_parameters()}


def digest(rank: int, world_size: int, path: str, backend: str, seed: int = 7) -> str:
    """Hash of all weights and of the buffers that constructors computed."""
    config = build_config(path, backend, seed=seed)
    model, _ = build_policy(config)
    fingerprint = hashlib.sha256()
    for name, tensor in gather_all(model).items():
        fingerprint.update(name.encode() + tensor.numpy().tobytes())
    plain = build_meta_model(config, resolve_path(config))
    for (name, buffer), (_, wanted) in zip(
        model.named_buffers(), plain.named_buffers(), strict=True
    ):
        assert buffer.device.type == "cpu", name
        assert torch.equal(buffer, wanted), name
        fingerprint.update(buffer.numpy().tobytes())
    return fingerprint.hexdigest()


def load_from_files(rank: int, world_size: int, backend: str, offload: bool) -> list[str]:
    fields = {"init_from_scratch": False, "fsdp": {"offload_params": offload}}
    config = build_config("tiny-qwen3", backend, **fields)
    model, _ = build_policy(config)
    wanted = load_file(resolve_path(config) / "model.safetensors")
    found = gather_all(model)
    assert found.keys() == wanted.keys()
    return [name for name, tensor in found.items() if not torch.equal(tensor, wanted[name])]


def load_full_state_dict(rank: int, world_size: int) -> tuple[list[str], str]:
    model, meshes = build_policy(build_config("tiny-llama", "fsdp:t2"))
    shapes = {name: p.shape for name, p in model.named_hf_parameters()}
    torch.manual_seed(5)
    whole = {name: torch.randn(shape) for name, shape in shapes.items()}
    whole["model.norm.weight"] = whole["model.norm.weight"].bfloat16()
    fsdp2_load_full_state_dict(model, whole if rank == 0 else {}, meshes, DEVICE)
    found = gather_all(model)
    mismatches = [n for n, tensor in whole.items() if not torch.equal(found[n], tensor.float())]
    del whole["model.norm.weight"]
    try:
        fsdp2_load_full_state_dict(model, whole if rank == 0 else {}, meshes, DEVICE)
    except CheckpointError as error:
        return mismatches, str(error)
    return mismatches, ""


class CountingSource:
    """Answers with zeros and adds up what it was asked for."""

    def __init__(self) -> None:
        self.elements = 0

    def check_names(self, shapes: dict[str, torch.Size]) -> None:
        self.names = list(shapes)

    def read(self, name: str, shape: torch.Size, region: Region) -> torch.Tensor:
        values = torch.zeros(shape_of(region))
        self.elements += values.numel()
        return values


def measure_regions(rank: int, world_size: int) -> tuple[int, int, int]:
    model, _ = build_policy(build_config("tiny-llama", "fsdp:d2t2"))
    source = CountingSource()
    fill_parameters(model, source)
    shards = sum(local_shard(parameter).numel() for parameter in model.parameters())
    return source.elements, shards, sum(p.shape.numel() for p in model.parameters())


def load_with_extras(rank: int, world_size: int, backend: str, folder: str) -> dict[str, Any]:
    """Load a tied model from folders that hold more tensors than it has parameters."""
    config = build_config("tiny-qwen3", backend)
    model, _ = build_policy(config)
    tensors = load_file(
        resolve_path(config.with_changes({"init_from_scratch": False})) / "model.safetensors"
    )
    embedding = tensors["model.embed_tokens.weight"]
    extras = {
        "equal head": {"lm_head.weight": embedding.clone()},
        "other head": {"lm_head.weight": embedding + 1.0},
        "other tensor": {"model.rotary.inv_freq": torch.ones(4)},
    }
    said: dict[str, Any] = {}
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdpbench").addHandler(handler)
    try:
        for name, more in extras.items():
            own = Path(folder) / f"{rank} {name}"
            own.mkdir()
            save_file({**tensors, **more}, own / "model.safetensors")
            try:
                fill_from_folder(model, own)
            except CheckpointError as error:
                said[name] = str(error)
            else:
                said[name] = ""
    finally:
        logging.getLogger("fsdpbench").removeHandler(handler)
    return {**said, "warnings": [text.partition(": ")[2] for text in records]}
