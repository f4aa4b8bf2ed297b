"""Writing weights as Hugging Face safetensors, tensor by tensor: no file is ever whole in memory.

Names, shapes and dtype are known before the first value, so each file begins with its final header
and tensors follow as they come (format: https://github.com/huggingface/safetensors#format). One
thread copies into the page cache, another makes the disk take what is there already, so that the
disk works from the start and little is left to wait for at the end.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from fsdpbench.engine.parallel.weight_files import FLOATING, INDEX_FILE, SINGLE_FILE

MAX_FILE_BYTES = 2 << 30
SYNC_BYTES = 128 << 20  # written between two orders to the disk
MAX_PENDING_BYTES = 512 << 20  # tensors that may wait for the writing thread
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
    """Takes tensors in the planned order and writes them while the caller goes on.

    With `own_files`, the tensors of other files are not this writer's. A failed write is raised by
    a later `add` or by `finish`; call `finish` or `abandon` in any case.
    """

    def __init__(
        self,
        folder: Path,
        file_of: Mapping[str, str],
        shapes: Mapping[str, torch.Size],
        dtype: torch.dtype,
        own_files: Collection[str] | None = None,
    ) -> None:
        self.folder, self.shapes, self.dtype = folder, shapes, dtype
        self.names_in: dict[str, list[str]] = {}
        for name, file in file_of.items():
            if own_files is None or file in own_files:
                self.names_in.setdefault(file, []).append(name)
        self.file_bytes: dict[str, int] = {}  # of the files that are complete
        self._file_of = file_of
        self._left = {file: len(names) for file, names in self.names_in.items()}
        self._open: dict[str, int] = {}  # file -> descriptor
        self._unsynced_bytes = 0
        self._pending: deque[tuple[int, Future[None]]] = deque()
        self._pending_bytes = 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="shard_writer")
        self._syncer = ThreadPoolExecutor(1, thread_name_prefix="shard_syncer")
        self._syncs: list[Future[None]] = []

    def takes(self, name: str) -> bool:
        """Tell whether a tensor goes into one of this writer's files."""
        return self._file_of[name] in self.names_in

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Accept the next tensor, on the CPU, in the planned dtype; do not change it afterwards."""
        size = tensor.numel() * tensor.element_size()
        while self._pending and self._pending_bytes + size > MAX_PENDING_BYTES:
            self._wait_for_oldest()
        self._pending.append((size, self._writer.submit(self._write, name, tensor.contiguous())))
        self._pending_bytes += size

    def finish(self) -> None:
        """Return when all files are complete and on the disk."""
        try:
            while self._pending:
                self._wait_for_oldest()
            for sync in self._syncs:
                sync.result()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Stop writing and close the files, whatever their state."""
        self._writer.shutdown(wait=True, cancel_futures=True)
        self._syncer.shutdown(wait=True)  # what waits there closes files
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def _wait_for_oldest(self) -> None:
        size, written = self._pending.popleft()
        self._pending_bytes -= size
        written.result()

    def _write(self, name: str, tensor: torch.Tensor) -> None:
        file = self._file_of[name]
        if file not in self._open:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            self._open[file] = os.open(self.folder / file, flags, 0o666)
            header = build_header(self.names_in[file], self.shapes, self.dtype)
            self.file_bytes[file] = write_all(self._open[file], memoryview(header))
        descriptor = self._open[file]
        values: Any = tensor.view(-1).view(torch.uint8).numpy()
        written = write_all(descriptor, memoryview(values))
        self.file_bytes[file] += written
        self._left[file] -= 1
        self._unsynced_bytes += written
        if not self._left[file]:
            self._syncs.append(self._syncer.submit(sync_and_close, self._open.pop(file)))
            self._unsynced_bytes = 0
        elif self._unsynced_bytes >= SYNC_BYTES:
            self._syncs.append(self._syncer.submit(os.fdatasync, descriptor))
            self._unsynced_bytes = 0


def write_all(descriptor: int, content: memoryview) -> int:
    """Write every byte, which one call need not do; return how many."""
    done = 0
    while done < len(content):
        done += os.write(descriptor, content[done:])
    return done


def sync_and_close(descriptor: int) -> None:
    """Wait until a file is on the disk; errors of earlier writes come out here at the latest."""
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
