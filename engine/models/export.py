"""Whole weights out of a sharded model: as an iterator, and as a Hugging Face folder.

Parameters leave one at a time, so no rank holds more than one full tensor on its device, and rank 0
no more than one file's worth in host memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from fsdpbench.engine.models.heads import PolicyModel
from fsdpbench.engine.models.shard_writer import MAX_FILE_BYTES, ShardWriter, plan_weight_files
from fsdpbench.engine.parallel.agreement import Agreement
from fsdpbench.engine.parallel.full_tensors import gather_full_tensor
from fsdpbench.engine.parallel.materialize import fill_from_folder
from fsdpbench.errors import CheckpointError

if TYPE_CHECKING:
    from fsdpbench.engine.device import Device
    from fsdpbench.engine.parallel.mesh import DeviceMeshes

# small files that make a folder complete besides config.json and the weights
COMPANIONS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "*.py",
)


def iterate_full_parameters(
    model: PolicyModel,
    meshes: DeviceMeshes,
    device: Device,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield (name in a Hugging Face checkpoint, whole tensor on rank 0's CPU, None elsewhere).

    Tied parameters appear once. Every rank must exhaust the iterator. Collective over: the world.
    """
    for name, parameter in model.named_hf_parameters():
        whole = gather_full_tensor(parameter, device.torch_device)
        if meshes.rank == 0:
            yield name, whole.to(dtype or whole.dtype).cpu()
        else:
            yield name, None
        del whole


def save_hf(
    model: PolicyModel,
    path: str | Path,
    meshes: DeviceMeshes,
    device: Device,
    *,
    source: Path,
    dtype: torch.dtype,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write weights in `dtype`, config.json and the source's tokenizer as one folder.

    Rank 0 writes beside the target and swaps at the end, so a broken save leaves the old folder.
    All ranks return after the swap; if rank 0 cannot write, all raise. Collective over: the world.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")
    writer = None
    with Agreement("save", meshes.cpu_group):
        if meshes.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # left by a save that was killed
            partial.mkdir(parents=True)
            shapes = {name: parameter.shape for name, parameter in model.named_hf_parameters()}
            writer = ShardWriter(partial, plan_weight_files(shapes, dtype, max_file_bytes))
    failure = None
    for name, tensor in iterate_full_parameters(model, meshes, device, dtype):
        if writer is None or tensor is None or failure is not None:
            continue  # after a failure the others still gather with us
        try:
            writer.add(name, tensor)
        except (OSError, SafetensorError) as error:
            failure = error
    with Agreement("save", meshes.cpu_group):
        if failure is not None:
            raise CheckpointError(f"{partial} cannot be written: {failure}") from failure
        if writer is not None:
            writer.finish()
            copy_companions(source, partial, dtype)
            swap_folder(partial, target)


def load_hf(model: PolicyModel, path: str | Path) -> None:
    """Fill a parallelized model from a folder; each rank reads its own part. No communication."""
    fill_from_folder(model, Path(path))


def copy_companions(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Copy config.json, its dtype set to what was written, and the tokenizer's files."""
    content = json.loads((source / "config.json").read_text(encoding="utf-8"))
    content.pop("torch_dtype", None)
    content["dtype"] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(f"{json.dumps(content, indent=2)}\n", encoding="utf-8")
    for pattern in COMPANIONS:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, target / file.name)


def swap_folder(partial: Path, target: Path) -> None:
    """Put a finished folder in the place of an older one, if there is any."""
    retired = target.with_name(f".{target.name}.retired")
    shutil.rmtree(retired, ignore_errors=True)
    if target.exists():
        target.rename(retired)
    partial.rename(target)
    shutil.rmtree(retired, ignore_errors=True)
