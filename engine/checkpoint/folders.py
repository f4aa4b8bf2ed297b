"""What kind of checkpoint a folder is, told by its files alone."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from fsdpbench.engine.parallel.weight_files import INDEX_FILE, SINGLE_FILE
from fsdpbench.errors import CheckpointError

DCP_METADATA = ".metadata"
DCP_SUFFIX = ".distcp"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
OPTIMIZER_FOLDER = "optimizer"  # inside a Hugging Face folder: a dcp checkpoint without weights


class FolderKind(Enum):
    """Kinds of folders, each with the words that errors use for it."""

    ABSENT = "absent"
    EMPTY = "an empty folder"
    HF = "a Hugging Face folder (weight_format: hf)"
    DCP = "a sharded checkpoint of torch (weight_format: dcp)"
    ADAPTER = "a folder of peft adapters (weight_format: adapter)"
    OTHER = "no checkpoint"


KIND_OF_FORMAT = {"hf": FolderKind.HF, "dcp": FolderKind.DCP, "adapter": FolderKind.ADAPTER}


def classify_folder(folder: Path) -> FolderKind:
    """Say what a folder is; an incomplete checkpoint counts as its kind."""
    if not folder.is_dir():
        return FolderKind.OTHER if folder.exists() else FolderKind.ABSENT
    names = {path.name for path in folder.iterdir()}
    if not names:
        return FolderKind.EMPTY
    if names & set(ADAPTER_FILES):
        return FolderKind.ADAPTER
    if DCP_METADATA in names or any(name.endswith(DCP_SUFFIX) for name in names):
        return FolderKind.DCP
    if names & {SINGLE_FILE, INDEX_FILE} or any(name.endswith(".safetensors") for name in names):
        return FolderKind.HF
    return FolderKind.OTHER


def check_kind(folder: Path, weight_format: str) -> None:
    """Refuse a folder that is not of the format that is asked for."""
    found = classify_folder(folder)
    wanted = KIND_OF_FORMAT[weight_format]
    if found is wanted:
        return
    if found is FolderKind.ABSENT:
        raise CheckpointError(f"{folder}: there is no such folder; it should be {wanted.value}.")
    formats = [name for name, kind in KIND_OF_FORMAT.items() if kind is found]
    remedy = f"Set weight_format to {formats[0]}" if formats else "Correct the path"
    raise CheckpointError(f"{folder} is {found.value}, and should be {wanted.value}. {remedy}.")
