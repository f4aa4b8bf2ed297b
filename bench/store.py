"""`results.jsonl`: append-only records that survive a torn line, a damaged one and a full disk.

A record is one write and one fsync. A write that the disk cuts short is taken back, so the file
always ends with a whole line while a writer holds it. One record of an id counts: the last.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from fsdpbench.bench.records import SCHEMA_VERSION, Record, encode
from fsdpbench.errors import FsdpbenchError


class StoreError(FsdpbenchError):
    """Results could not be written or read."""


@dataclass(frozen=True)
class ReadResult:
    """The readable records in file order, and what was skipped and why."""

    records: list[Record] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_records(path: Path) -> ReadResult:
    """Read all whole records; a torn or damaged line is named in `problems` and skipped."""
    result = ReadResult()
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return result
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = Record.model_validate_json(line)
        except ValidationError:
            torn = number == len(lines)
            what = "torn last line, skipped" if torn else "not a record, skipped"
            result.problems.append(f"{path}:{number}: {what}")
            continue
        if record.schema_version > SCHEMA_VERSION:
            result.problems.append(
                f"{path}:{number}: schema_version={record.schema_version} is newer than "
                f"{SCHEMA_VERSION}, skipped; update fsdpbench"
            )
            continue
        result.records.append(record)
    return result


def keep_latest(records: Iterable[Record]) -> list[Record]:
    """Return one record for each id, the last one, in the order in which ids first appeared."""
    latest: dict[str, Record] = {}
    for record in records:
        latest[record.id] = record
    return list(latest.values())


class ResultWriter:
    """Appends records to one file. The caller holds the run's lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._end_with_whole_line()
        except OSError as error:
            raise _describe(path, error) from error

    def _end_with_whole_line(self) -> None:
        """Cut a torn tail away, or end it if it is a whole record that only lacks its newline."""
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        tail = content[whole:]
        if not tail:
            return
        try:
            Record.model_validate_json(tail)
        except ValidationError:
            os.ftruncate(self._descriptor, whole)
        else:
            os.lseek(self._descriptor, 0, os.SEEK_END)
            os.write(self._descriptor, b"\n")
        os.fsync(self._descriptor)

    def append(self, record: Record) -> None:
        """Add one record: returns once it is on the disk; raises with the file as it was before."""
        line = encode(record).encode() + b"\n"
        end = os.lseek(self._descriptor, 0, os.SEEK_END)
        try:
            written = os.write(self._descriptor, line)
            while written < len(line):  # a nearly full disk takes a part first, then says ENOSPC
                written += os.write(self._descriptor, line[written:])
            os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, end)
            raise _describe(self.path, error) from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def _describe(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{path}: cannot be written: {error.strerror}. All trials recorded so far are kept; "
        "make room or mend the permissions, then continue with --resume."
    )
