"""Whether a checkpoint is complete and fits, found out from headers and sizes before any loading.

Each check reads tables and file sizes only, so a broken checkpoint is refused in moments and
nothing of the model has been overwritten by then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from fsdpbench.engine.checkpoint.folders import ADAPTER_FILES, DCP_METADATA, check_kind
from fsdpbench.engine.checkpoint.metadata import read_metadata
from fsdpbench.engine.parallel.weight_files import describe_mismatch, find_tensors, read_header
from fsdpbench.errors import CheckpointError, list_names


def check_folder(folder: Path, weight_format: str) -> None:
    """Raise CheckpointError unless the folder is a complete checkpoint of this format."""
    if weight_format == "dcp":
        check_dcp(folder)
    elif weight_format == "hf":
        check_hf(folder)
    else:
        check_adapter(folder)


def check_hf(folder: Path) -> None:
    """Refuse a Hugging Face folder with a file that is missing, cut short or no safetensors."""
    check_kind(folder, "hf")
    tensors = find_tensors(folder)
    headers = {file: read_header(file) for file in sorted(set(tensors.values()))}
    for file, header in headers.items():
        lacking = [name for name, place in tensors.items() if place == file and name not in header]
        if lacking:
            raise CheckpointError(f"{file} lacks {list_names(lacking)}, which the index names.")


def check_adapter(folder: Path) -> None:
    """Refuse a folder of adapters whose weights are missing or cut short."""
    check_kind(folder, "adapter")
    absent = [name for name in ADAPTER_FILES if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(f"{folder} lacks {list_names(absent)}.")
    read_header(folder / ADAPTER_FILES[1])


def check_dcp(folder: Path) -> Metadata:
    """Return the table of a sharded checkpoint whose data files are all there and long enough."""
    check_kind(folder, "dcp")
    metadata = read_metadata(folder)
    unplaced = [index.fqn for index in list_pieces(metadata) if index not in metadata.storage_data]
    if unplaced:
        raise CheckpointError(
            f"{folder / DCP_METADATA} is not complete: it says of no file that it holds "
            f"{list_names(dict.fromkeys(unplaced))}. A thread or rank of its save failed; take an "
            "older checkpoint."
        )
    needed_bytes: dict[str, int] = {}
    for place in metadata.storage_data.values():
        end = place.offset + place.length
        needed_bytes[place.relative_path] = max(end, needed_bytes.get(place.relative_path, 0))
    absent, short = [], []
    for name, end in sorted(needed_bytes.items()):
        file = folder / name
        if file.parent != folder:
            raise CheckpointError(f"{folder / DCP_METADATA} names a file elsewhere: {name}")
        if not file.is_file():
            absent.append(name)
        elif file.stat().st_size < end:
            short.append(f"{name} ({file.stat().st_size} bytes, should be {end})")
    if absent:
        raise CheckpointError(f"{folder} lacks {list_names(absent)}, which {DCP_METADATA} names.")
    if short:
        raise CheckpointError(f"{folder}: truncated {list_names(short)}. Copy them anew.")
    return metadata


def list_pieces(metadata: Metadata) -> list[MetadataIndex]:
    """List what the table promises: every chunk of every tensor, every other value."""
    pieces = []
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            pieces += [MetadataIndex(name, chunk.offsets) for chunk in entry.chunks]
        else:
            pieces.append(MetadataIndex(name))
    return pieces


def list_shapes(metadata: Metadata, prefix: str) -> dict[str, torch.Size]:
    """Map the tensors below a prefix to their whole shapes; the prefix is left out."""
    return {
        name.removeprefix(prefix): entry.size
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }


def check_entries(
    folder: Path,
    metadata: Metadata,
    what: str,
    prefix: str,
    expected: Mapping[str, torch.Size],
) -> None:
    """Refuse a sharded checkpoint whose tensors below `prefix` are not exactly the expected ones.

    The message names the first five of the missing, unexpected and mis-shaped ones, and the files
    that hold those.
    """
    found = list_shapes(metadata, prefix)
    problems = describe_mismatch(expected, found)
    if not problems:
        return
    foreign = [name for name, size in found.items() if expected.get(name) != size]
    files = find_files(metadata, [f"{prefix}{name}" for name in foreign])
    where = f" (in {list_names(files)})" if files else ""
    raise CheckpointError(
        f"{folder / DCP_METADATA}: {what}: {'; '.join(problems)}{where}. "
        "The checkpoint belongs to another model or other settings."
    )


def find_files(metadata: Metadata, names: Collection[str]) -> list[str]:
    """List the data files that hold pieces of these entries."""
    wanted = set(names)
    places = metadata.storage_data.items()
    return sorted({place.relative_path for index, place in places if index.fqn in wanted})
