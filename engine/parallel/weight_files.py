"""Reading a folder of safetensors region by region; the files are mapped, never read whole.

One file or several with `model.safetensors.index.json`, as transformers writes them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fsdpbench.engine.parallel.regions import Region, shape_of
from fsdpbench.errors import CheckpointError, list_names

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOATING = ("F64", "F32", "F16", "BF16")  # what a master weight can be made of


class SafetensorsWeights:
    """A source of values: the tensors of one checkpoint folder, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file_of = find_tensors(folder)  # tensor name -> file
        self._open: dict[Path, safe_open] = {}  # mappings stay open; pages come and go

    def check_names(self, shapes: Mapping[str, torch.Size]) -> None:
        """Raise CheckpointError naming what is missing, of another shape or not of numbers."""
        missing = [name for name in shapes if name not in self.file_of]
        wrong, quantized = [], []
        for name, shape in shapes.items():
            if name in missing:
                continue
            stored = self._slice_of(name)
            if list(stored.get_shape()) != list(shape):
                wrong.append(f"{name} (file {list(stored.get_shape())}, model {list(shape)})")
            if stored.get_dtype() not in FLOATING:
                quantized.append(f"{name} ({stored.get_dtype()})")
        problems = []
        if missing:
            problems.append(f"missing {list_names(missing)}")
        if wrong:
            problems.append(f"of another shape: {list_names(wrong)}")
        if quantized:
            problems.append(f"neither of {', '.join(FLOATING)}: {list_names(quantized)}")
        if problems:
            raise CheckpointError(
                f"{self.folder}: {'; '.join(problems)}. "
                "The weights belong to another model than config.json says."
            )

    def find_unused(self, names: Collection[str]) -> list[str]:
        """List the tensors of the files that a model of these names does not read."""
        return [name for name in self.file_of if name not in names]

    def read(self, name: str, shape: torch.Size, region: Region) -> torch.Tensor:
        """Read the region of a tensor into host memory, in the file's dtype."""
        if 0 in shape_of(region):
            return torch.empty(shape_of(region))
        values: torch.Tensor = self._slice_of(name)[region]
        return values

    def _slice_of(self, name: str) -> Any:  # safetensors' slice class is not public
        file = self.file_of[name]
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file} cannot be read: {error}") from error
        try:
            return self._open[file].get_slice(name)  # type: ignore[no-untyped-call]
        except SafetensorError as error:  # the index names a tensor that the file lacks
            raise CheckpointError(f"{file} cannot be read: {error}") from error


def find_tensors(folder: Path) -> dict[str, Path]:
    """Map each tensor of a checkpoint folder to its file."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():  # first, as in transformers
        try:
            with safe_open(single, framework="pt") as content:
                files = dict.fromkeys(content.keys(), single)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{single} cannot be read: {error}") from error
    elif index.is_file():
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {name: folder / file for name, file in names.items()}
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise CheckpointError(f"{index} cannot be read: {error!r}") from error
    else:
        raise CheckpointError(
            f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}. "
            "Give a folder with safetensors weights, or set init_from_scratch to true."
        )
    absent = sorted({file.name for file in files.values() if not file.is_file()})
    if absent:
        raise CheckpointError(f"{folder} lacks {list_names(absent)}, which {INDEX_FILE} names.")
    return files
