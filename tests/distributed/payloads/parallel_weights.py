"""Shards and where their values come from."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from fsdpbench.engine.config.parallel import parse_backend
from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.device import Device
from fsdpbench.engine.models.heads import PolicyModel
from fsdpbench.engine.models.load import build_meta_model, resolve_path
from fsdpbench.engine.parallel.full_tensors import gather_full_tensor
from fsdpbench.engine.parallel.materialize import (
    allocate_shards,
    fill_parameters,
    fsdp2_load_full_state_dict,
    load_folder,
)
from fsdpbench.engine.parallel.mesh import DeviceMeshes, build_meshes
from fsdpbench.engine.parallel.parallelize import parallelize_model
from fsdpbench.engine.parallel.regions import Region, local_shard, shape_of
from fsdpbench.errors import FsdpbenchError
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


def build_empty(
    config: TrainEngineConfig, device: Device = DEVICE
) -> tuple[PolicyModel, DeviceMeshes]:
    """A sharded model with storage whose values are NaN."""
    meshes = build_meshes(parse_backend(config.backend).strategy, device.type)
    model = build_meta_model(config, resolve_path(config))
    parallelize_model(model, config, meshes, device)
    allocate_shards(model, device, in_host_memory=config.fsdp.offload_params)
    for parameter in model.parameters():
        local_shard(parameter).fill_(torch.nan)
    return model, meshes


def load_from_files(
    rank: int,
    world_size: int,
    path: str,
    backend: str,
    offload: bool,
    broadcast: bool,
    kind: str = "cpu",
) -> list[str]:
    """Load in many small buckets; under broadcast the other ranks see config.json alone."""
    config = build_config(path, backend, attn_impl="sdpa", fsdp={"offload_params": offload})
    device = Device(kind, None if kind == "cpu" else rank)
    model, meshes = build_empty(config, device)
    source = resolve_path(config.with_changes({"init_from_scratch": False}))
    bare = resolve_path(config)
    folder = bare if broadcast and rank else source
    load_folder(model, folder, meshes, device, broadcast=broadcast, bucket_bytes=20_000)
    wanted = load_file(source / "model.safetensors")
    resting = "cpu" if offload else kind
    assert {local_shard(p).device.type for p in model.parameters()} == {resting}
    found = {
        name: gather_full_tensor(parameter, device.torch_device).cpu()
        for name, parameter in model.named_hf_parameters()
    }
    assert found.keys() == wanted.keys()
    return [n for n, tensor in found.items() if not torch.equal(tensor, wanted[n].float())]


def load_full_state_dict(rank: int, world_size: int) -> tuple[list[str], str]:
    """From rank 0's tensors of several dtypes and layouts; then with one missing."""
    model, meshes = build_empty(build_config("tiny-llama", "fsdp:t2"))
    shapes = {name: p.shape for name, p in model.named_hf_parameters()}
    torch.manual_seed(5)
    whole = {name: torch.randn(shape) for name, shape in shapes.items()}
    whole["model.norm.weight"] = whole["model.norm.weight"].bfloat16()
    whole["lm_head.weight"] = whole["lm_head.weight"].t().contiguous().t()
    whole["more"] = torch.zeros(1)
    fsdp2_load_full_state_dict(model, whole if rank == 0 else {}, meshes, DEVICE)
    found = gather_all(model)
    mismatches = [n for n in found if not torch.equal(found[n], whole[n].float())]
    del whole["model.norm.weight"]
    try:
        fsdp2_load_full_state_dict(model, whole if rank == 0 else {}, meshes, DEVICE)
    except FsdpbenchError as error:
        return mismatches, f"{type(error).__name__}: {error}"
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
    fill_parameters(dict(model.named_hf_parameters()), source)
    shards = sum(local_shard(parameter).numel() for parameter in model.parameters())
    return source.elements, shards, sum(p.shape.numel() for p in model.parameters())


def load_with_extras(
    rank: int, world_size: int, backend: str, folder: str, broadcast: bool
) -> dict[str, Any]:
    """Load a tied model from folders that hold more tensors than it has parameters."""
    config = build_config("tiny-qwen3", backend)
    model, meshes = build_empty(config)
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
                load_folder(model, own, meshes, DEVICE, broadcast=broadcast, bucket_bytes=30_000)
            except FsdpbenchError as error:
                said[name] = str(error)
            else:
                said[name] = ""
    finally:
        logging.getLogger("fsdpbench").removeHandler(handler)
    return {**said, "warnings": [text.partition(": ")[2] for text in records]}
