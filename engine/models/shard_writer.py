"""Writing weights as Hugging Face safetensors, tensor by tensor: no file is ever whole in memory.

Names, shapes and dtype are known before the first value, so each file begins with its final header
and the place of every tensor is known (format: https://github.com/huggingface/safetensors#format).

Pieces are written by several threads, off the device (`off_device`) into the page cache. One more
makes the disk take what is there already, so that it works from the start.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fsdpbench.engine.parallel.off_device import OffDevice
from fsdpbench.engine.parallel.weight_files import FLOATING, INDEX_FILE, SINGLE_FILE

MAX_FILE_BYTES = 2 << 30
SYNC_BYTES = 128 << 20  # written between two orders to the disk
WORD_OF_DTYPE = {dtype: word for word, dtype in FLOATING.items()}


def plan_weight_files(
    shapes: Mapping[str, torch.Size], dtype: torch.dtype, max_file_bytes: int = MAX_FILE_BYTES
) -> dict[str, str]:
    """Map each tensor to a file name, filling files in order; a larger tensor has its own file."""
    groups: list[list[str]] = []
    filled = 0
    for name, shape in shapes.items():
        size = shape.numel() * dtype.itemsize
        if not groups or filled + size > max_file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return dict.fromkeys(shapes, SINGLE_FILE)
    return {
        name: f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        for number, names in enumerate(groups, start=1)
        for name in names
    }


def spread_weight_files(
    shapes: Mapping[str, torch.Size], dtype: torch.dtype, num_files: int
) -> dict[str, str]:
    """Map each tensor to the file with the fewest bytes so far: neighbours go to different files.

    A system lets one thread at a time write to a file, so that this is how several write at once.
    """
    if num_files <= 1:
        return dict.fromkeys(shapes, SINGLE_FILE)
    filled = [0] * min(num_files, len(shapes))
    file_of: dict[str, str] = {}
    for name, shape in shapes.items():
        number = filled.index(min(filled))
        filled[number] += max(1, shape.numel() * dtype.itemsize)
        file_of[name] = f"model-{number + 1:05d}-of-{len(filled):05d}.safetensors"
    return file_of


def write_index(
    folder: Path, file_of: Mapping[str, str], shapes: Mapping[str, torch.Size], dtype: torch.dtype
) -> None:
    """Write the index that tells which file a tensor is in; a single file needs none."""
    if set(file_of.values()) == {SINGLE_FILE}:
        return
    total = sum(shapes[name].numel() for name in file_of) * dtype.itemsize
    index = {"metadata": {"total_size": total}, "weight_map": dict(file_of)}
    (folder / INDEX_FILE).write_text(f"{json.dumps(index, indent=2)}\n", encoding="utf-8")


def build_header(
    names: Iterable[str], shapes: Mapping[str, torch.Size], dtype: torch.dtype
) -> bytes:
    """Build the start of a file whose tensors follow without gaps, in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        start, end = end, end + shapes[name].numel() * dtype.itemsize
        word = WORD_OF_DTYPE[dtype]
        entries[name] = {"dtype": word, "shape": list(shapes[name]), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # values begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


class ShardWriter:
    """Takes whole tensors, of any file in any order, and writes them while the caller goes on.

    With `own_files`, the tensors of other files are not this writer's. `durable` files are on the
    disk when `finish` returns; others are complete for every reader, but a machine that fails may
    lose them. A failed write is raised by a later `add` or by `finish`; call `finish` or `abandon`
    in any case.
    """

    def __init__(
        self,
        folder: Path,
        file_of: Mapping[str, str],
        shapes: Mapping[str, torch.Size],
        dtype: torch.dtype,
        own_files: Collection[str] | None = None,
        *,
        durable: bool = True,
    ) -> None:
        self.folder, self.shapes, self.dtype, self.durable = folder, shapes, dtype, durable
        self.names_in: dict[str, list[str]] = {}
        for name, file in file_of.items():
            if own_files is None or file in own_files:
                self.names_in.setdefault(file, []).append(name)
        self.file_bytes: dict[str, int] = {}  # written so far
        self._file_of = file_of
        self._offsets: dict[str, int] = {}  # of the tensors in files that are open
        self._left: dict[str, int] = {}  # bytes that are to come, of files that are open
        self._open: dict[str, int] = {}  # file -> descriptor
        self._unsynced_bytes = 0
        self._lock = threading.Lock()  # of the counts, which the threads keep
        self._pieces = OffDevice()
        self._syncer = ThreadPoolExecutor(1, thread_name_prefix="shard_syncer")
        self._syncs: list[Future[None]] = []

    def takes(self, name: str) -> bool:
        """Tell whether a tensor goes into one of this writer's files."""
        return self._file_of[name] in self.names_in

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Accept a tensor in the planned dtype. One on the CPU must not be changed afterwards.

        One on a device is copied on the current stream before this returns, or soon after.
        """
        file = self._file_of[name]
        if file not in self.file_bytes:
            self._begin(file)
        place = self._offsets[name]
        self._pieces.submit(
            tensor.contiguous(), lambda start: partial(self._write, file, place + start)
        )

    def finish(self) -> None:
        """Return when all files are complete; durable ones are on the disk then."""
        try:
            self._pieces.finish()
            complete = self.file_bytes.keys() == self.names_in.keys() and not self._open
            assert complete, "too few tensors were added"
            for sync in self._syncs:
                sync.result()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Stop writing and close the files, whatever their state."""
        self._pieces.close()
        self._syncer.shutdown(wait=True)  # what waits there closes files
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def _begin(self, file: str) -> None:
        names = self.names_in[file]
        header = build_header(names, self.shapes, self.dtype)
        end = len(header)
        for name in names:
            self._offsets[name] = end
            end += self.shapes[name].numel() * self.dtype.itemsize
        self.file_bytes[file], self._left[file] = 0, end
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._open[file] = os.open(self.folder / file, flags, 0o666)
        self._write(file, 0, torch.frombuffer(bytearray(header), dtype=torch.uint8))

    def _write(self, file: str, offset: int, piece: torch.Tensor) -> None:
        size = piece.numel()
        values: Any = piece.numpy()
        write_all(self._open[file], memoryview(values), offset)
        with self._lock:
            self.file_bytes[file] += size
            self._left[file] -= size
            self._unsynced_bytes += size
            if not self._left[file]:
                close = sync_and_close if self.durable else os.close
                self._syncs.append(self._syncer.submit(close, self._open.pop(file)))
            elif self.durable and self._unsynced_bytes >= SYNC_BYTES:
                self._syncs.append(self._syncer.submit(os.fdatasync, self._open[file]))
                self._unsynced_bytes = 0


def write_all(descriptor: int, content: memoryview, offset: int) -> None:
    """Write every byte, which one call need not do."""
    done = 0
    while done < len(content):
        done += os.pwrite(descriptor, content[done:], offset + done)


def sync_and_close(descriptor: int) -> None:
    """Wait until a file is on the disk; errors of earlier writes come out here at the latest."""
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
