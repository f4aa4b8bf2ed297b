"""Writing weights as Hugging Face safetensors, one file's worth of tensors in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from fsdpbench.engine.parallel.weight_files import INDEX_FILE, SINGLE_FILE

MAX_FILE_BYTES = 2 << 30


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


class ShardWriter:
    """Takes tensors in the planned order and writes each file as soon as it is complete."""

    def __init__(self, folder: Path, file_of: Mapping[str, str]) -> None:
        self.folder, self.file_of = folder, file_of
        self._pending: dict[str, torch.Tensor] = {}
        self._total_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Accept the next tensor, on the CPU; it is held until its file is written."""
        if self._pending and self.file_of[name] != self.file_of[next(iter(self._pending))]:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._total_bytes += tensor.numel() * tensor.element_size()

    def finish(self) -> None:
        """Write what is left, and the index if there are several files."""
        self._flush()
        if set(self.file_of.values()) == {SINGLE_FILE}:
            return
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(self.file_of)}
        text = json.dumps(index, indent=2)
        (self.folder / INDEX_FILE).write_text(f"{text}\n", encoding="utf-8")

    def _flush(self) -> None:
        if not self._pending:
            return
        file = self.folder / self.file_of[next(iter(self._pending))]
        save_file(self._pending, file, metadata={"format": "pt"})
        self._pending = {}
