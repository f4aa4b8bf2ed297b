"""Hugging Face folders out of a sharded model and back: safetensors, index, config, tokenizer.

Schedule of a save. Files are planned once, by size. Parameters are gathered one after the other on
every rank; the rank that owns a parameter's file copies it to the host in pieces and writes them in
the background, while the next ones are gathered. So ranks write at the same time, and none holds
more than one full tensor on its device and a few pieces in host memory. Tied weights are written
once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fsdpbench.engine.checkpoint.companions import copy_companions
from fsdpbench.engine.checkpoint.dcp import (
    build_manifest,
    build_state,
    check_state,
    collect_state,
    load_state,
    write_shards,
)
from fsdpbench.engine.checkpoint.folders import OPTIMIZER_FOLDER
from fsdpbench.engine.checkpoint.manifest import read_manifest
from fsdpbench.engine.checkpoint.recover import agree_on_checkpoint
from fsdpbench.engine.checkpoint.store import as_write_error
from fsdpbench.engine.checkpoint.transaction import FolderTransaction
from fsdpbench.engine.checkpoint.verify import check_dcp, check_hf
from fsdpbench.engine.models.export import iterate_gathered_parameters
from fsdpbench.engine.models.shard_writer import (
    MAX_FILE_BYTES,
    ShardWriter,
    plan_weight_files,
    spread_weight_files,
    write_index,
)
from fsdpbench.engine.parallel.adapter_values import fill_adapters
from fsdpbench.engine.parallel.agreement import Agreement
from fsdpbench.engine.parallel.materialize import load_folder
from fsdpbench.engine.parallel.off_device import NUM_THREADS
from fsdpbench.errors import CheckpointError, ConfigError, Violation

if TYPE_CHECKING:
    from fsdpbench.engine.config.checkpoint import SaveLoadMeta
    from fsdpbench.engine.setup import EngineParts

MIN_FILE_BYTES = 256 << 20  # smaller files would gain nothing from being written side by side
MIN_SPREAD_BYTES = 32 << 20  # of a file on average, where tensors are spread


def save_hf(
    parts: EngineParts, meta: SaveLoadMeta, version: int, *, max_file_bytes: int | None = None
) -> None:
    """Write the weights, in the dtype they are kept in, as one folder. Collective over: the world.

    With `with_optim` the training state goes into a folder inside, which other programs ignore.
    """
    check_no_merged_optimizer(parts, meta)
    group = parts.meshes.cpu_group
    dtype = getattr(torch, parts.config.weights_dtype)
    with FolderTransaction(meta.path, group) as save:
        own_files = write_model(parts, save.partial, dtype, max_file_bytes=max_file_bytes)
        if meta.with_optim:
            state = collect_state(parts, version, with_model=False)
            write_shards(state, save.partial / OPTIMIZER_FOLDER, group)
        save.publish(build_manifest(parts, meta, version), own_files)


def write_model(
    parts: EngineParts,
    folder: Path,
    dtype: torch.dtype,
    *,
    max_file_bytes: int | None = None,
    durable: bool = True,
) -> dict[str, int]:
    """Fill an existing folder with weights in `dtype`, index, config.json and tokenizer.

    Without `durable` nobody waits for the disk, and tensors are spread over files for speed.
    Returns the sizes in bytes of the weight files that this rank wrote. Collective over: the world.
    """
    shapes = {name: parameter.shape for name, parameter in parts.model.named_hf_parameters()}
    total_bytes = sum(shape.numel() for shape in shapes.values()) * dtype.itemsize
    world_size = parts.meshes.world_size
    if durable:  # then the disk is the limit, and files have the customary order
        limit = max_file_bytes or choose_file_bytes(total_bytes, world_size)
        file_of = plan_weight_files(shapes, dtype, limit)
    else:
        num_files = min(NUM_THREADS * world_size, total_bytes // MIN_SPREAD_BYTES)
        file_of = spread_weight_files(shapes, dtype, num_files)
    own_files = write_weights(parts, folder, file_of, shapes, dtype, durable)
    with Agreement("save", parts.meshes.cpu_group), as_write_error(folder):
        if parts.meshes.rank == 0:
            write_index(folder, file_of, shapes, dtype)
            copy_companions(parts.source, folder, dtype)
    return own_files


def choose_file_bytes(total_bytes: int, world_size: int) -> int:
    """Return a file size with which every rank has two files, between 256 MiB and 2 GiB."""
    return min(MAX_FILE_BYTES, max(MIN_FILE_BYTES, -(-total_bytes // (2 * world_size))))


def divide_files(file_of: Mapping[str, str], world_size: int) -> dict[str, int]:
    """Map each file to the rank that writes it, in turns: neighbours are written side by side."""
    files = dict.fromkeys(file_of.values())
    return {file: number % world_size for number, file in enumerate(files)}


def write_weights(
    parts: EngineParts,
    folder: Path,
    file_of: Mapping[str, str],
    shapes: Mapping[str, torch.Size],
    dtype: torch.dtype,
    durable: bool = True,
) -> dict[str, int]:
    """Write this rank's files; return their sizes in bytes. Collective over: the world.

    A rank that cannot write gathers on, so that no peer waits for it, and fails at the end.
    """
    owner_of = divide_files(file_of, parts.meshes.world_size)
    own = [file for file, owner in owner_of.items() if owner == parts.meshes.rank]
    writer = ShardWriter(folder, file_of, shapes, dtype, own, durable=durable)
    failure: Exception | None = None
    try:
        for name, whole in iterate_gathered_parameters(parts.model, parts.device, dtype):
            if failure is not None or not writer.takes(name):
                continue
            try:
                writer.add(name, whole)
            except (OSError, RuntimeError, MemoryError) as error:  # all hear of it below
                failure = error
        with Agreement("save", parts.meshes.cpu_group), as_write_error(folder):
            if failure is not None:
                raise failure
            writer.finish()
    finally:
        writer.abandon()
    return writer.file_bytes


def load_hf(parts: EngineParts, meta: SaveLoadMeta) -> int | None:
    """Read weights, and with `with_optim` the training state. Collective over: the world.

    Returns the version that the folder was saved with, None for a folder of another program.
    """
    check_no_merged_optimizer(parts, meta)
    group = parts.meshes.cpu_group
    folder = agree_on_checkpoint(meta.path, meta.weight_format, group)
    with Agreement("load", group):
        check_hf(folder)
        manifest = read_manifest(folder)
        if meta.with_optim:
            check_optimizer_folder(parts, folder)
    broadcast = parts.config.broadcasts_weights
    with Agreement("load", group):  # without broadcast an error is one rank's alone
        load_folder(parts.model, folder, parts.meshes, parts.device, broadcast=broadcast)
    # a folder holds merged weights: adapters begin anew, or they would count twice
    fill_adapters(parts.model, parts.config, parts.device)
    if meta.with_optim:
        return load_state(parts, folder / OPTIMIZER_FOLDER, with_model=False)
    return None if manifest is None else manifest.version


def check_no_merged_optimizer(parts: EngineParts, meta: SaveLoadMeta) -> None:
    """Refuse to keep the states of adapters beside weights into which those were merged."""
    if meta.with_optim and parts.model.adapters is not None:
        allowed = "a Hugging Face folder holds merged weights, and the states belong to adapters"
        remedy = "set weight_format to dcp, or with_optim to false"
        raise ConfigError([Violation("with_optim", "True", allowed, remedy)])


def check_optimizer_folder(parts: EngineParts, folder: Path) -> None:
    """Refuse a folder whose training state is missing, broken or of another optimizer."""
    inner = folder / OPTIMIZER_FOLDER
    if not inner.is_dir():
        raise CheckpointError(
            f"{folder}: with_optim=True, but there is no folder {OPTIMIZER_FOLDER} inside. "
            "Load it with with_optim=False, or save with with_optim=True."
        )
    check_state(inner, check_dcp(inner), build_state(parts, with_model=False))
