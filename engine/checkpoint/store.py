"""Folders that appear whole or not at all, on one machine; nothing here communicates.

A checkpoint grows in a hidden folder beside its target, whose name tells the host and process it
belongs to. When it is on the disk for good it takes the target's place: the two are exchanged in
one system call, or where a file system lacks that, by two renames between which the older one has
the name `.retired`, from where `restore_retired` brings it back.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import socket
from pathlib import Path

from fsdpbench.engine.checkpoint.folders import FolderKind, classify_folder
from fsdpbench.engine.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    is_intact,
    list_files,
    read_manifest,
    write_manifest,
)
from fsdpbench.errors import CheckpointError, list_names
from fsdpbench.log import get_logger

AT_FDCWD = -100  # renameat2: paths are as given
RENAME_EXCHANGE = 2
NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
logger = get_logger(__name__)


def open_partial(target: Path) -> Path:
    """Make the folder that is to become `target`, after clearing away what dead saves left.

    Raises CheckpointError if something stands at the target that is not ours to replace.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        restore_retired(target)
        check_replaceable(target)
        remove_leftovers(target)
        partial = sibling_of(target, "partial")
        partial.mkdir()
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error
    return partial


def publish(partial: Path, target: Path, manifest: Manifest) -> None:
    """Put a finished folder in the target's place and remove what stood there, if it was ours.

    Whatever happens, the target is the old checkpoint or the new one.
    """
    try:
        write_manifest(partial, manifest)
        sync_tree(partial)
        check_replaceable(target)
        retired = sibling_of(target, "retired")
        if target.exists():
            if exchange(partial, target):
                partial.rename(retired)
            else:
                target.rename(retired)
                partial.rename(target)
        else:
            partial.rename(target)
        sync_file(target.parent)  # the names are on the disk before the old files go
        remove_checkpoint(retired)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error


def check_replaceable(target: Path) -> None:
    """Refuse to write over anything but an empty folder or a checkpoint of ours."""
    if classify_folder(target) in (FolderKind.ABSENT, FolderKind.EMPTY):
        return
    if target.is_dir() and read_manifest(target) is not None:
        return
    raise CheckpointError(
        f"{target} exists and was not saved by this engine ({MANIFEST_FILE} is missing). "
        "Give another path, or move it away."
    )


def remove_checkpoint(folder: Path) -> None:
    """Remove the files of a checkpoint of ours; whatever else lies in the folder stays."""
    if not folder.is_dir():
        return
    manifest = read_manifest(folder)
    if manifest is not None:
        for name in manifest.files:
            (folder / name).unlink(missing_ok=True)
        (folder / MANIFEST_FILE).unlink()  # last: while it is there, a later call can go on
    inner = [path for path in folder.rglob("*") if path.is_dir()]
    for path in (*sorted(inner, reverse=True), folder):
        if not any(path.iterdir()):
            path.rmdir()
    if folder.exists():
        names = list_names(sorted(list_files(folder)))
        logger.warning("%s keeps files that were added to the older checkpoint: %s", folder, names)


def abandon(partial: Path) -> None:
    """Remove the folder or file of a save that failed."""
    if partial.is_dir():
        shutil.rmtree(partial, ignore_errors=True)
    else:
        partial.unlink(missing_ok=True)


def sibling_of(target: Path, state: str) -> Path:
    """Name a folder of this process beside the target; `state` is partial or retired."""
    return target.with_name(f".{target.name}.{host_name()}.{os.getpid()}.{state}")


def host_name() -> str:
    """Return this machine's name in letters that suit a file name."""
    return re.sub(r"[^\w.-]", "_", socket.gethostname()) or "localhost"


def find_siblings(target: Path, state: str) -> list[tuple[Path, str, int]]:
    """List (path, host, process id) of saves to this target, the newest first."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.([\w.-]+)\.(\d+)\.{state}")
    found = []
    for path in target.parent.iterdir() if target.parent.is_dir() else ():
        match = pattern.fullmatch(path.name)
        if match:
            found.append((path, match[1], int(match[2])))
    return sorted(found, key=lambda entry: entry[0].stat().st_mtime, reverse=True)


def restore_retired(target: Path) -> bool:
    """Bring back a checkpoint whose replacement died between its two renames; True if it did."""
    if target.exists():
        return False
    for folder, host, process in find_siblings(target, "retired"):
        if is_stale(host, process) and is_intact(folder):
            folder.rename(target)
            logger.warning("%s was being replaced when its saver died; restored", target)
            return True
    return False


def remove_leftovers(target: Path) -> None:
    """Remove what saves of dead processes of this host left beside the target."""
    for state in ("retired", "partial"):
        for folder, host, process in find_siblings(target, state):
            if host != host_name() or not is_stale(host, process):
                continue
            if state == "retired" or read_manifest(folder) is not None:
                remove_checkpoint(folder)
            else:
                abandon(folder)


def is_stale(host: str, process: int) -> bool:
    """Tell whether no save of that process can be under way, as far as this host can see."""
    if host != host_name():
        return True  # the caller takes nothing away from another host but what is complete
    if process == os.getpid():
        return True  # a process saves to one target one time after the other
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def sync_file(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Wait until everything in a folder is on the disk; what is there already costs nothing."""
    for path in folder.rglob("*"):
        sync_file(path)
    sync_file(folder)


def exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step (Linux renameat2); False where the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    names = os.fsencode(first), os.fsencode(second)
    if rename(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))
