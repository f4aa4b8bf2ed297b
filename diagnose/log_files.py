"""Log files: which files of a folder are logs, and what of a huge one is read.

A folder of a job also holds code, data and checkpoints, whose words would be taken for the job's.
So a log must say so by its name, and must be text. Of a huge log both ends are read: what failed
first mostly stands where the job began or where it ended, and a search of all of it takes minutes
a gigabyte. The lines between count, so that evidence names the right ones, but are not searched.
"""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import BinaryIO

from fsdpbench.errors import ConfigError, Violation
from fsdpbench.log import get_logger, warn_once
from fsdpbench.units import MIB, format_bytes

logger = get_logger(__name__)

HUGE_BYTES = 256 * MIB
HEAD_BYTES = 32 * MIB
TAIL_BYTES = 96 * MIB
BLOCK_BYTES = 4 * MIB
SNIFFED_BYTES = 4096

# a word of a log's name
WORDS = frozenset(
    {
        "log", "logs", "out", "output", "err", "error", "errors", "stdout", "stderr", "console",
        "nohup", "slurm",
    }
)  # fmt: skip
# a file of this kind is no log, whatever its name says
OTHER_SUFFIXES = frozenset(
    {
        ".py", ".pyc", ".sh", ".c", ".cc", ".cpp", ".cu", ".h", ".js", ".ts", ".css", ".ipynb",
        ".json", ".jsonl", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".csv", ".tsv", ".xml",
        ".md", ".rst", ".html", ".pdf", ".png", ".jpg", ".svg", ".lock", ".pid", ".tmp",
        ".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".pt", ".pth", ".bin", ".safetensors",
        ".npy", ".npz", ".pkl", ".parquet", ".arrow", ".db", ".so", ".o", ".a",
    }
)  # fmt: skip
FOREIGN_FOLDERS = frozenset({"__pycache__", "site-packages", "node_modules"})
_BATCH_SYSTEM = re.compile(r"\.[oe]\d+\Z")  # PBS: JOB.o123, JOB.e123
_RANK = re.compile(r"rank\D?\d+\D*\.txt\Z")


def is_log_name(name: str) -> bool:
    """Say whether a file's name is one of a log: `train.log.1`, `slurm-12.out`, `stderr`."""
    lower = name.lower()
    if lower.startswith(".") or Path(lower).suffix in OTHER_SUFFIXES:
        return False
    words = WORDS.intersection(re.findall("[a-z]+", lower))
    return bool(words or _BATCH_SYSTEM.search(lower) or _RANK.search(lower))


def find_logs(folder: Path) -> list[Path]:
    """Return the log files below a folder, sorted; ConfigError if there is none.

    Hidden folders, installed packages and links to folders are left out. A file that cannot be
    read is left out with a warning.
    """
    found = []
    for root, folders, files in os.walk(folder, onerror=_warn_unreadable):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name not in FOREIGN_FOLDERS
            and not Path(root, name, "pyvenv.cfg").exists()
        ]
        found += [path for name in files if is_log_name(name) and is_log(path := Path(root, name))]
    if not found:
        allowed = "must hold files whose names say log, out, err, stdout or stderr"
        remedy = "name the log files themselves"
        raise ConfigError([Violation(str(folder), "no log file", allowed, remedy)])
    return sorted(found)


def _warn_unreadable(error: OSError) -> None:
    warn_once(logger, f"{error.filename}: cannot be read, skipped: {error.strerror}")


def is_log(path: Path) -> bool:
    """Say whether a file can be read as text, by its first bytes."""
    try:
        if not path.is_file():  # reading a pipe or a device may never end
            return False
        with path.open("rb") as file:
            return not looks_binary(file.read(SNIFFED_BYTES))
    except OSError as error:
        _warn_unreadable(error)
        return False


def looks_binary(head: bytes) -> bool:
    """Say whether a file that begins so is no text.

    Zeros at the very start do not count: a log that was cut while a process wrote on has them.
    """
    head = head.lstrip(b"\0")
    if b"\0" in head:
        return True
    odd = sum(byte < 9 or 13 < byte < 27 or 27 < byte < 32 for byte in head)
    undecodable = head.decode("utf-8", errors="replace").count("\ufffd")
    return odd > len(head) // 20 or undecodable > max(1, len(head) // 10)


def open_log(path: Path) -> BinaryIO:
    """Open a log for reading; of a huge one the middle reads as empty lines.

    Raises OSError for what cannot be read, a folder included.
    """
    file = path.open("rb", buffering=0)
    size = os.fstat(file.fileno()).st_size
    if size <= HUGE_BYTES:
        return io.BufferedReader(file)
    between = format_bytes(size - HEAD_BYTES - TAIL_BYTES)
    warn_once(logger, f"{path}: {format_bytes(size)}, {between} in the middle are not searched")
    ends: io.RawIOBase = _Ends(file, HEAD_BYTES, size - TAIL_BYTES)
    return io.BufferedReader(ends)


class _Ends(io.RawIOBase):
    """A file of which only the newlines are read between two positions."""

    def __init__(self, file: io.FileIO, middle_start: int, middle_end: int) -> None:
        self._file = file
        self._middle_start = middle_start
        self._middle_end = middle_end
        self._num_newlines = 0  # counted and not handed out yet

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        position = self._file.tell()
        if position < self._middle_start:
            with memoryview(buffer)[: self._middle_start - position] as head:
                return self._file.readinto(head) or 0
        while self._file.tell() < self._middle_end and not self._num_newlines:
            block = self._file.read(min(BLOCK_BYTES, self._middle_end - self._file.tell()))
            if not block:  # the file was cut meanwhile
                break
            self._num_newlines = block.count(b"\n")
        if self._num_newlines:
            count = min(len(buffer), self._num_newlines)
            buffer[:count] = b"\n" * count
            self._num_newlines -= count
            return count
        return self._file.readinto(buffer) or 0
