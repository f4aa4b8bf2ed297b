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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
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

# what threads of this process are writing or replacing now, and the numbers in those names
_under_way: set[Path] = set()
_numbers = count()


@contextmanager
def as_write_error(target: Path) -> Iterator[None]:
    """Turn what the file system refuses into a CheckpointError that names the target."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error


def resolve_path(path: str | Path) -> Path:
    """Return the folder that a path means: absolute, links followed."""
    try:
        return Path(path).expanduser().resolve()
    except (OSError, RuntimeError) as error:  # a circle of links, no home, no current folder
        raise CheckpointError(f"{path} leads nowhere: {error}") from error


def open_partial(target: Path) -> Path:
    """Make the folder that is to become `target`, after clearing away what dead saves left.

    Raises CheckpointError if something stands at the target that is not ours to replace. To be
    followed by `close_partial`, whatever becomes of the save.
    """
    with as_write_error(target):
        restore_retired(target)
        check_replaceable(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target)
        partial = sibling_of(target, "partial")
        _under_way.add(partial)
        partial.mkdir()
    return partial


def publish(partial: Path, target: Path, manifest: Manifest) -> None:
    """Put a finished folder in the target's place and remove what stood there, if it was ours.

    Whatever happens, the target is the old checkpoint or the new one. An old one that cannot be
    removed is no failure of this save; the log names it.
    """
    retired = sibling_of(target, "retired")
    _under_way.add(retired)
    try:
        with as_write_error(target):
            write_manifest(partial, manifest)
            sync_tree(partial)
            check_replaceable(target)
            swap(partial, target, retired)
            sync_file(target.parent)  # the names are on the disk before the old files go
        remove_checkpoint(retired)
    finally:
        _under_way.discard(retired)


def swap(partial: Path, target: Path, retired: Path) -> None:
    """Give `partial` the target's name; a checkpoint that had it becomes `retired`."""
    if classify_folder(target) in (FolderKind.ABSENT, FolderKind.EMPTY):
        partial.rename(target)  # takes the place of an empty folder, and of no other
    elif exchange(partial, target):
        partial.rename(retired)
    else:
        target.rename(retired)
        try:
            partial.rename(target)
        except OSError:
            retired.rename(target)
            raise


def check_replaceable(target: Path) -> None:
    """Refuse to write over anything but an empty folder or a checkpoint of ours, or into one."""
    outer = next((path for path in target.parents if (path / MANIFEST_FILE).exists()), None)
    if outer is not None:
        raise CheckpointError(
            f"{target} is inside the checkpoint {outer}, whose next save would take it away. "
            "Give a path beside it."
        )
    if target.is_mount():
        raise CheckpointError(
            f"{target} is where a file system is mounted, which no save can replace. "
            "Give a folder inside it."
        )
    if classify_folder(target) in (FolderKind.ABSENT, FolderKind.EMPTY):
        return
    if target.is_dir() and read_manifest(target) is not None:
        return
    raise CheckpointError(
        f"{target} exists and was not saved by this engine ({MANIFEST_FILE} is missing). "
        "Give another path, or move it away."
    )


def remove_checkpoint(folder: Path) -> None:
    """Remove the files of a checkpoint of ours; whatever else lies in the folder stays.

    What cannot be removed stays, too; the log says why.
    """
    try:
        manifest = read_manifest(folder)
        if manifest is None:
            return
        whole = folder.resolve()
        for name in manifest.files:
            file = folder / name
            if file.parent.resolve().is_relative_to(whole):  # no link leads out of the folder
                file.unlink(missing_ok=True)
        (folder / MANIFEST_FILE).unlink()  # last: while it is there, a later call can go on
        inner = [path for path in folder.rglob("*") if path.is_dir() and not path.is_symlink()]
        for path in (*sorted(inner, reverse=True), folder):
            if not any(path.iterdir()):
                path.rmdir()
        if folder.exists():
            kept = list_names(sorted(list_files(folder)))
            logger.warning(
                "%s keeps files that were added to the older checkpoint: %s", folder, kept
            )
    except (OSError, CheckpointError) as error:
        logger.warning("%s cannot be removed: %s", folder, error)


def close_partial(partial: Path, target: Path) -> None:
    """Remove the folder or file of a save that failed; nothing if it was published.

    An exchange may have brought an older checkpoint there, with files that are not ours.
    """
    _under_way.discard(partial)
    try:
        if is_checkpoint(partial):
            remove_checkpoint(partial.rename(sibling_of(target, "retired")))
        elif partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", partial, error)


def is_checkpoint(folder: Path) -> bool:
    """Tell whether a folder has a manifest that can be read; a kill may leave half of one."""
    try:
        return read_manifest(folder) is not None
    except CheckpointError:
        return False


def write_whole(file: Path, text: str) -> None:
    """Replace a file by another text; readers see the old one or the new one."""
    remove_leftovers(file)
    partial = sibling_of(file, "partial")
    _under_way.add(partial)
    try:
        partial.write_text(text, encoding="utf-8")
        sync_file(partial)
        partial.replace(file)
        sync_file(file.parent)
    finally:
        close_partial(partial, file)


def sibling_of(target: Path, state: str) -> Path:
    """Name a new folder of this process beside the target; `state` is partial or retired."""
    while True:
        owner = f"{host_name()}.{os.getpid()}-{next(_numbers)}"
        path = target.with_name(f".{target.name}.{owner}.{state}")
        if not os.path.lexists(path):  # an earlier process may have had the same id
            return path


def host_name() -> str:
    """Return this machine's name in letters that suit a file name, without a dot."""
    return re.sub(r"[^\w-]", "_", socket.gethostname()) or "localhost"


def find_siblings(target: Path, state: str) -> list[tuple[Path, str, int]]:
    """List (path, host, process id) of saves to this target, the newest first."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.([\w-]+)\.(\d+)-\d+\.{state}")
    found = []
    for path in target.parent.iterdir() if target.parent.is_dir() else ():
        match = pattern.fullmatch(path.name)
        if match:
            with suppress(FileNotFoundError):  # another process may clear it away
                found.append((path.lstat().st_mtime, path, match[1], int(match[2])))
    return [entry[1:] for entry in sorted(found, reverse=True)]


def restore_retired(target: Path) -> bool:
    """Bring back a checkpoint whose replacement died between its two renames; True if it did."""
    if target.exists():
        return False
    for folder, host, process in find_siblings(target, "retired"):
        with suppress(FileNotFoundError):  # another process was faster
            if not may_be_used(folder, host, process) and is_intact(folder):
                folder.rename(target)
                logger.warning("%s was being replaced when its saver died; restored", target)
                return True
    return False


def remove_leftovers(target: Path) -> None:
    """Remove what saves of dead processes of this host left beside the target."""
    for state in ("retired", "partial"):
        for path, host, process in find_siblings(target, state):
            if host != host_name() or may_be_used(path, host, process):
                continue
            if state == "retired":
                remove_checkpoint(path)
            else:
                close_partial(path, target)


def may_be_used(path: Path, host: str, process: int) -> bool:
    """Tell whether a save of that process may be under way, as far as this host can see."""
    if host != host_name():
        return False  # the caller takes nothing away from another host but what is complete
    if process == os.getpid():  # or of an earlier one with this id
        return path in _under_way
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it lives, and is another user's
        return True
    return True


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
