"""Sharded checkpoints of torch: each rank writes and reads its own shards, for any later mesh.

Source: torch.distributed.checkpoint, through its public writer and reader. What is added: folders
appear whole, files are verified before anything is overwritten, `.metadata` is read without running
what it says, and an error of one rank is everybody's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from fsdpbench.engine.checkpoint.early_flush import flushing_early
from fsdpbench.engine.checkpoint.folders import DCP_METADATA
from fsdpbench.engine.checkpoint.manifest import Manifest
from fsdpbench.engine.checkpoint.metadata import CheckedPlanner, CheckedReader
from fsdpbench.engine.checkpoint.recover import agree_on_checkpoint
from fsdpbench.engine.checkpoint.state import (
    MODEL,
    OPTIMIZER,
    RNG,
    DCPState,
    read_random_states,
    shapes_of,
)
from fsdpbench.engine.checkpoint.transaction import FolderTransaction
from fsdpbench.engine.checkpoint.verify import check_dcp, check_entries, list_shapes
from fsdpbench.engine.parallel.agreement import Agreement
from fsdpbench.errors import CheckpointError
from fsdpbench.log import get_logger, warn_once

if TYPE_CHECKING:
    from fsdpbench.engine.config.checkpoint import SaveLoadMeta
    from fsdpbench.engine.setup import EngineParts

ROOT = "engine"  # the one entry of our checkpoints; all names begin with it
WRITER_THREADS = 4  # files a rank; they fill the disk's queue and serialise beside each other
logger = get_logger(__name__)


def build_state(
    parts: EngineParts, *, version: int = 0, with_model: bool = True, with_optim: bool = True
) -> DCPState:
    """Build the view of an engine's state that is saved or loaded."""
    return DCPState(
        parts.model,
        parts.optimizer if with_optim else None,
        parts.scheduler if with_optim else None,
        version=version,
        device=parts.device,
        rank=parts.meshes.rank,
        with_model=with_model,
        with_rng=with_optim,
    )


def build_manifest(parts: EngineParts, meta: SaveLoadMeta, version: int) -> Manifest:
    """Describe a save; the files are listed when they are there."""
    return Manifest(meta.weight_format, version, meta.with_optim, parts.meshes.world_size)


def collect_state(
    parts: EngineParts, version: int, *, with_model: bool = True, with_optim: bool = True
) -> dict[str, Any]:
    """Collect what a save writes, as live tensors. Collective over: the world."""
    with Agreement("save", parts.meshes.cpu_group):
        state = build_state(parts, version=version, with_model=with_model, with_optim=with_optim)
        return {ROOT: state.state_dict()}


def save_dcp(parts: EngineParts, meta: SaveLoadMeta, version: int) -> None:
    """Write weights, and with `with_optim` the whole training state. Collective over: the world."""
    content = collect_state(parts, version, with_optim=meta.with_optim)
    manifest = build_manifest(parts, meta, version)
    write_checkpoint(content, meta.path, manifest, parts.meshes.cpu_group)


def write_checkpoint(
    content: dict[str, Any],
    path: str | Path,
    manifest: Manifest,
    group: dist.ProcessGroup,
    *,
    num_threads: int = WRITER_THREADS,
) -> None:
    """Write a state dict as the checkpoint at `path`. Collective over: the group."""
    with FolderTransaction(path, group) as folder:
        write_shards(content, folder.partial, group, num_threads)
        folder.publish(manifest, {})


def write_shards(
    content: dict[str, Any],
    folder: Path,
    group: dist.ProcessGroup,
    num_threads: int = WRITER_THREADS,
) -> None:
    """Write a state dict's shards and table into a folder of ours. Collective over: the group.

    Torch loses the errors of its writer threads, so rank 0 compares the table with the files
    before anybody calls this a success.
    """
    writer = FileSystemWriter(folder, thread_count=num_threads)
    early = flushing_early(folder, f"__{dist.get_rank(group)}_")
    with early, without_checksums(), as_checkpoint_error(folder, "written"):
        save(content, storage_writer=writer, process_group=group)
    with Agreement("save", group):
        if dist.get_rank(group) == 0:
            check_dcp(folder)


@contextmanager
def without_checksums() -> Iterator[None]:
    """Leave out the CRC32 of each tensor: at 2 GB/s a core it would take as long as the disk does.

    Torch's loader does not check it. The switch is the process's; a save elsewhere meanwhile
    would be as readable.
    """
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


@contextmanager
def as_checkpoint_error(folder: Path, verb: str) -> Iterator[None]:
    """Turn torch's collected failures of the ranks into one CheckpointError on every rank."""
    try:
        yield
    except CheckpointException as error:
        rank, (first, _) = min(error.failures.items())
        text = f"{folder} cannot be {verb}: rank {rank}: {type(first).__name__}: {first}"
        raise CheckpointError(text) from first


def load_dcp(parts: EngineParts, meta: SaveLoadMeta) -> int:
    """Read a checkpoint of any mesh into the live tensors; return its version.

    Collective over: the world.
    """
    folder = agree_on_checkpoint(meta.path, meta.weight_format, parts.meshes.cpu_group)
    return load_state(parts, folder, with_optim=meta.with_optim)


def load_state(
    parts: EngineParts, folder: Path, *, with_model: bool = True, with_optim: bool = True
) -> int:
    """Read a sharded checkpoint, or a training state saved without weights; return its version.

    Checked first on every rank; if one refuses, nothing is overwritten anywhere. Random states are
    restored if as many ranks saved them. Collective over: the world.
    """
    group = parts.meshes.cpu_group
    with Agreement("load", group):
        metadata = check_dcp(folder)
        state = build_state(parts, with_model=with_model, with_optim=with_optim)
        check_state(folder, metadata, state)
        state.with_rng &= check_random_states(folder, metadata, state, parts.meshes.world_size)
        content = {ROOT: state.state_dict()}
    read_shards(content, folder, metadata, group)
    with Agreement("load", group):
        state.load_state_dict(content[ROOT])
    return state.version


def read_shards(
    content: dict[str, Any], folder: Path, metadata: Metadata, group: dist.ProcessGroup
) -> None:
    """Fill a state dict from verified files. Collective over: the group."""
    with as_checkpoint_error(folder, "read"):
        load(
            content,
            storage_reader=CheckedReader(folder, metadata),
            planner=CheckedPlanner(),
            process_group=group,
        )


def check_state(folder: Path, metadata: Metadata, state: DCPState) -> None:
    """Refuse a checkpoint without what the state needs. Local."""
    if not any(name.startswith(f"{ROOT}.") for name in metadata.state_dict_metadata):
        raise CheckpointError(
            f"{folder / DCP_METADATA}: no entry begins with {ROOT!r}: another program wrote this "
            "checkpoint. Convert it to a Hugging Face folder and load that."
        )
    if state.with_model:
        expected = shapes_of(state.model_tensors())
        check_entries(folder, metadata, "weights", f"{ROOT}.{MODEL}.", expected)
    if state.optimizer is None:
        return
    prefix = f"{ROOT}.{OPTIMIZER}."
    expected = {
        f"{name}.{kind}": tensor.shape
        for name, states in state.optimizer_tensors().items()
        for kind, tensor in states.items()
    }
    untrained = not list_shapes(metadata, f"{ROOT}.{RNG}.")  # saved with all training states
    if untrained or (expected and not list_shapes(metadata, prefix)):
        raise CheckpointError(
            f"{folder}: with_optim=True, but the checkpoint holds no optimizer states. "
            "Load it with with_optim=False, or save with with_optim=True."
        )
    check_entries(folder, metadata, "optimizer states", prefix, expected)


def check_random_states(folder: Path, metadata: Metadata, state: DCPState, world_size: int) -> bool:
    """Tell whether the checkpoint has a random state for each of the ranks; say so if not."""
    found = list_shapes(metadata, f"{ROOT}.{RNG}.")
    ranks = {name.partition(".")[0] for name in found}
    own = shapes_of(read_random_states(state.device))
    fits = all(found.get(f"rank{state.rank}.{name}") == shape for name, shape in own.items())
    if fits and len(ranks) == world_size:
        return True
    if ranks:
        warn_once(
            logger,
            f"{folder} was saved by {len(ranks)} ranks and is loaded by {world_size}, or on "
            "another kind of device: random states stay as they are",
        )
    return False
