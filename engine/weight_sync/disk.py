"""Weights on a file system that trainer and rollout engines share: one folder a version.

A version grows in a hidden folder. When it is complete, the list of its files is written into it
and it is renamed to `v00000007`: a folder of that name with all its listed files is the
announcement, and there is no other. Whatever fails before leaves the older versions as they were.
Only folders with such a list are ever removed, and of them only the files listed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch.distributed as dist

from fsdpbench.engine.parallel.agreement import Agreement
from fsdpbench.errors import FsdpbenchError, PeerError, WeightSyncError, list_names
from fsdpbench.log import get_logger
from fsdpbench.units import format_bytes

LIST_FILE = "weight_version.json"
SCHEMA_VERSION = 1
FOLDER_PATTERN = re.compile(r"v(\d{8,})")
PARTIAL_PATTERN = re.compile(r"\.v\d{8,}\.([\w.-]+)\.(\d+)\.partial")
POLL_SECONDS = 0.05
logger = get_logger(__name__)


class DiskChannel:
    """The trainer's end. Only rank 0 of `group` (host tensors) makes, names and removes folders.

    Without a group the process is alone. One trainer owns the folder `path`.
    """

    def __init__(
        self, path: str | Path, *, keep_versions: int = 2, group: dist.ProcessGroup | None = None
    ) -> None:
        self.path = Path(path).expanduser().resolve()
        self.keep_versions = keep_versions
        self.group = group
        self.leads = group is None or dist.get_rank(group) == 0

    def publish(self, version: int, write: Callable[[Path], None], num_bytes: int = 0) -> Path:
        """Let all ranks `write` a version into a folder, announce it and return its path.

        `write` fills the folder that it is given; it may communicate, and ends on all ranks or
        fails on all. Where `num_bytes` are not free on the disk nothing is begun. Afterwards the
        oldest versions beyond `keep_versions` are removed. Collective over: the group.
        """
        partial: Path | None = None
        try:
            with self._agreement():
                if self.leads:
                    partial = self._open_partial(version, num_bytes)
            partial = self._tell(partial)
            with self._agreement():
                write(partial)
            self._check_shared(partial)
            with self._agreement():
                if self.leads:
                    self._announce(partial, version)
        except (OSError, FsdpbenchError) as error:
            if isinstance(error, PeerError):
                raise
            raise WeightSyncError(self._describe(version, error)) from error
        finally:
            if self.leads and partial is not None:
                shutil.rmtree(partial, ignore_errors=True)  # gone already if all went well
        return folder_of(self.path, version)

    def _agreement(self) -> AbstractContextManager[None]:
        return nullcontext() if self.group is None else Agreement("weight update", self.group)

    def _tell(self, partial: Path | None) -> Path:
        said = [None if partial is None else str(partial)]
        if self.group is not None:
            dist.broadcast_object_list(said, group=self.group, group_src=0)
        assert said[0] is not None  # rank 0 made it, or all have raised
        return Path(said[0])

    def _open_partial(self, version: int, num_bytes: int) -> Path:
        self.path.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.path)
        target = folder_of(self.path, version)
        if target.exists() and read_file_list(target) is None:
            raise WeightSyncError(f"{target} exists and was not written by a weight update")
        free_bytes = shutil.disk_usage(self.path).free
        if free_bytes < num_bytes:
            needed = f"{format_bytes(num_bytes)} are needed, {format_bytes(free_bytes)} are free"
            raise WeightSyncError(f"no space left: {needed}")
        partial = self.path / f".{target.name}.{host_name()}.{os.getpid()}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        return partial

    def _check_shared(self, partial: Path) -> None:
        """Refuse a folder that is another one on another machine. Collective over: the group."""
        if self.group is None:
            return
        seen: list[dict[str, int]] = [{}] * dist.get_world_size(self.group)
        dist.all_gather_object(seen, list_files(partial), group=self.group)
        for rank, files in enumerate(seen):
            unseen = sorted(files.items() - seen[0].items())
            if unseen:
                names = list_names(name for name, _ in unseen)
                raise WeightSyncError(
                    f"rank 0 does not see {names} as rank {rank} wrote it. "
                    "Set weight_update.path to a file system that all machines share"
                )

    def _announce(self, partial: Path, version: int) -> None:
        files = list_files(partial)
        if not files:
            raise WeightSyncError("nothing was written")
        content = {"schema_version": SCHEMA_VERSION, "version": version, "files": files}
        (partial / LIST_FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")
        target = folder_of(self.path, version)
        if target.exists():  # of an earlier run that was not resumed from here
            remove_version(target)
        partial.rename(target)
        try:
            for old in list_versions(self.path)[: -self.keep_versions]:
                if old != target:
                    remove_version(old)
        except OSError as error:  # the new version is there: this is no failure of the update
            logger.warning("an old version of the weights stays: %s", error)

    def _describe(self, version: int, error: BaseException) -> str:
        kept = list_versions(self.path)
        stays = f"{kept[-1]} stays as it was" if kept else "no older version is there"
        return (
            f"weights of version {version} could not be written to {self.path}: "
            f"{str(error).rstrip('.')}; {stays}. "
            "Make room or correct the path; the rollout engines keep the version in force."
        )


def folder_of(path: Path, version: int) -> Path:
    """Return where a version lies."""
    return path / f"v{version:08d}"


def list_versions(path: Path) -> list[Path]:
    """List the folders of announced versions, the oldest first."""
    found = []
    for folder in path.iterdir() if path.is_dir() else ():
        match = FOLDER_PATTERN.fullmatch(folder.name)
        if match and (folder / LIST_FILE).is_file():
            found.append((int(match[1]), folder))
    return [folder for _, folder in sorted(found)]


def await_version(folder: Path, timeout_seconds: float, version: int | None = None) -> None:
    """Return when a version is announced and all its files are seen in full on this machine.

    Other machines may see names and sizes late. A folder that is no version of a channel (a plain
    Hugging Face folder) passes at once; WeightSyncError says what is missing after the time-out.
    """
    deadline = time.monotonic() + timeout_seconds
    while problem := find_problem(folder, version):
        if time.monotonic() >= deadline:
            raise WeightSyncError(
                f"{folder}: {problem}. The trainer has not announced it, has removed it since "
                "(raise keep_versions), or this machine does not share its file system."
            )
        time.sleep(POLL_SECONDS)


def find_problem(folder: Path, version: int | None) -> str | None:
    """Say why a folder cannot be read as a version yet; None if it can."""
    if not folder.is_dir():
        return "there is no such folder"
    files = read_file_list(folder)
    match = FOLDER_PATTERN.fullmatch(folder.name)
    if files is None:
        return f"it has no {LIST_FILE}" if match else None
    if match and version is not None and int(match[1]) != version:
        return f"it is version {int(match[1])}, and {version} was asked for"
    found = list_files(folder)
    lacking = [name for name, size in files.items() if found.get(name) != size]
    return f"{list_names(lacking)} is missing or incomplete" if lacking else None


def list_files(folder: Path) -> dict[str, int]:
    """Map the files of a folder, the list itself aside, to their sizes in bytes."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / LIST_FILE
    }


def read_file_list(folder: Path) -> dict[str, int] | None:
    """Return the files that a version consists of, with sizes; None for any other folder."""
    try:
        content = json.loads((folder / LIST_FILE).read_text(encoding="utf-8"))
        files = {str(name): int(size) for name, size in content["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    inside = all(".." not in Path(name).parts and not Path(name).is_absolute() for name in files)
    return files if inside else None


def remove_version(folder: Path) -> None:
    """Remove the files of a version; what was added to its folder stays."""
    files = read_file_list(folder)
    if files is None:
        return
    (folder / LIST_FILE).unlink(missing_ok=True)  # first: from here on it is announced no more
    for name in files:
        (folder / name).unlink(missing_ok=True)
    inner = [path for path in folder.rglob("*") if path.is_dir()]
    for path in (*sorted(inner, reverse=True), folder):
        if not any(path.iterdir()):
            path.rmdir()
    if folder.exists():
        names = list_names(sorted(list_files(folder)))
        logger.warning("%s keeps files that were added to an old version: %s", folder, names)


def remove_leftovers(path: Path) -> None:
    """Remove hidden folders that dead processes of this machine left behind."""
    for folder in path.iterdir():
        match = PARTIAL_PATTERN.fullmatch(folder.name)
        if match and match[1] == host_name() and not is_alive(int(match[2])):
            shutil.rmtree(folder, ignore_errors=True)


def host_name() -> str:
    """Return this machine's name in letters that suit a file name."""
    return re.sub(r"[^\w.-]", "_", socket.gethostname()) or "localhost"


def is_alive(process: int) -> bool:
    """Tell whether a process of this machine runs."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
