"""The newest checkpoint of a folder of checkpoints: a pointer file, and a search where it fails."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from fsdpbench.engine.checkpoint.folders import KIND_OF_FORMAT, FolderKind, classify_folder
from fsdpbench.engine.checkpoint.manifest import read_manifest
from fsdpbench.engine.checkpoint.store import resolve_path, restore_retired, write_whole
from fsdpbench.engine.checkpoint.verify import check_folder
from fsdpbench.engine.parallel.agreement import Agreement
from fsdpbench.errors import CheckpointError
from fsdpbench.log import get_logger, warn_once

LATEST_FILE = "latest"
MAX_POINTER_BYTES = 1024  # a name and the end of a line
logger = get_logger(__name__)


def point_latest(checkpoint: Path) -> None:
    """Name a checkpoint in the pointer file beside it; readers see the old name or the new one.

    Something else of that name is left alone. CheckpointError if the file cannot be written.
    """
    pointer = checkpoint.with_name(LATEST_FILE)
    try:
        if os.path.lexists(pointer) and not is_pointer(pointer):
            warn_once(logger, f"{pointer} is no pointer to a checkpoint and stays as it is")
            return
        write_whole(pointer, f"{checkpoint.name}\n")
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint} is saved, but {pointer} cannot be written: {error}. "
            "Load with the path of the checkpoint itself."
        ) from error


def is_pointer(path: Path) -> bool:
    """Tell whether something that exists may be one of our pointer files."""
    plain = path.is_file() and not path.is_symlink()
    return plain and path.stat().st_size <= MAX_POINTER_BYTES


def find_latest(folder: str | Path, weight_format: str | None = None) -> Path | None:
    """Return the newest complete checkpoint inside a folder, of one format if it is given.

    That is the one that the pointer file names, or, if that is gone, damaged or of another format,
    the one with the highest version among our own. None if there is none. Local.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        return None
    named = read_pointer(root)
    if named is not None:
        restore_retired(named)
        if is_complete(named, weight_format):
            return named
    candidates = []
    for path in root.iterdir():
        if path.name.startswith(".") or not path.is_dir():
            continue
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue
        if manifest is not None:
            candidates.append((manifest.version, path.stat().st_mtime_ns, path))
    ordered = [path for _, _, path in sorted(candidates, reverse=True)]
    return next((path for path in ordered if is_complete(path, weight_format)), None)


def read_pointer(root: Path) -> Path | None:
    """Return the checkpoint that the pointer file names; None if the file names nothing inside."""
    try:
        name = (root / LATEST_FILE).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    inside = bool(name) and Path(name).name == name and name != ".."
    return root / name if inside else None


def is_complete(checkpoint: Path, weight_format: str | None = None) -> bool:
    """Tell whether a checkpoint could be loaded, as far as its files show."""
    kind = classify_folder(checkpoint)
    formats = [name for name, known in KIND_OF_FORMAT.items() if known is kind]
    if not formats or weight_format not in (None, formats[0]):
        return False
    try:
        check_folder(checkpoint, formats[0])
    except CheckpointError as error:
        warn_once(logger, f"skipping a checkpoint that is not complete: {error}")
        return False
    return True


def resolve_checkpoint(path: str | Path, weight_format: str) -> Path:
    """Return the checkpoint that a path means: itself, or the latest one in a folder of them."""
    folder = resolve_path(path)
    restore_retired(folder)
    if classify_folder(folder) is FolderKind.OTHER and folder.is_dir():
        return find_latest(folder, weight_format) or folder
    return folder


def agree_on_checkpoint(path: str, weight_format: str, group: dist.ProcessGroup) -> Path:
    """Return the checkpoint that a path means to rank 0: what is latest may change meanwhile.

    Collective over: the group.
    """
    said = [path]
    with Agreement("load", group):
        if dist.get_rank(group) == 0:
            said = [str(resolve_checkpoint(path, weight_format))]
    dist.broadcast_object_list(said, group=group, group_src=0)
    return Path(said[0])
