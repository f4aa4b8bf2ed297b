"""What a Hugging Face folder of weights holds, read from the files' headers; no torch, no tensors.

Servers are trusting: vLLM loads a folder that lacks tensors without a word and keeps the old ones
for them, and one with a tensor of another shape leaves it beyond repair. So a folder is held
against the one that the server began with before the server hears of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fsdpbench.errors import ConfigError, WeightSyncError, list_names

LENGTH_BYTES = 8  # of a safetensors file: length of the header, little endian
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
TIED_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class WeightInventory:
    """Names and shapes of a model's tensors."""

    shapes: Mapping[str, tuple[int, ...]]
    is_tied: bool  # the head is the embedding; files may hold it or not
    vocab_size: int | None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a folder; WeightSyncError if it is not whole."""
        config = _read_json(folder / "config.json")
        config = {**config, **(config.get("text_config") or {})}
        shapes: dict[str, tuple[int, ...]] = {}
        for path in _list_files(folder):
            shapes |= _read_shapes(path)
        return cls(shapes, bool(config.get("tie_word_embeddings")), config.get("vocab_size"))

    def check_tensors(self, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
        """Raise WeightSyncError if one is unknown to the model or of another shape."""
        known = {**({TIED_HEAD: None} if self.is_tied else {}), **self.shapes}
        unknown = [name for name in shapes if name not in known]
        other = [
            f"{name} {list(shape)} instead of {list(self.shapes[name])}"
            for name, shape in shapes.items()
            if name in self.shapes and tuple(shape) != tuple(self.shapes[name])
        ]
        if unknown or other:
            found = [f"unexpected: {list_names(unknown)}"] if unknown else []
            found += [f"of another shape: {list_names(other)}"] if other else []
            raise WeightSyncError(
                f"{where}: {'; '.join(found)}. The server holds another model; start it with the "
                "trainer's own path."
            )

    def check_complete(self, names: set[str], where: str) -> None:
        """Raise WeightSyncError if a tensor of the model is not among the names."""
        needed = set(self.shapes) - ({TIED_HEAD} if self.is_tied else set())
        missing = sorted(needed - names)
        if missing:
            raise WeightSyncError(
                f"{where}: lacks {list_names(missing)}. The server would keep the old values for "
                "them; write or send the whole model."
            )

    def check_ids(self, sequences: Iterable[Iterable[int]]) -> None:
        """Raise ConfigError for ids outside the vocabulary; one ends a vLLM without a tokenizer."""
        limit = self.vocab_size
        for index, tokens in enumerate(sequences):
            wrong = [token for token in tokens if limit is not None and not 0 <= token < limit]
            if wrong:
                raise ConfigError(
                    f"sequence {index}: token id {wrong[0]} is none of the model's {limit}. Does "
                    "the tokenizer belong to it?"
                )


def _list_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise WeightSyncError(f"{folder}: holds no *.safetensors; give a complete folder")
    return [folder / name for name in names]


def _read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            header: Any = json.loads(file.read(min(length, MAX_HEADER_BYTES)))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        ends = [entry["data_offsets"][1] for entry in entries.values()]
        shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
        num_bytes = path.stat().st_size
    except (OSError, ValueError, AttributeError, KeyError, IndexError, TypeError) as error:
        raise WeightSyncError(f"{path}: is no whole safetensors file ({error})") from error
    if num_bytes != LENGTH_BYTES + length + max(ends, default=0):
        raise WeightSyncError(f"{path}: is cut off or still being written; save it again")
    return shapes


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightSyncError(f"{path}: cannot be read ({error}); give a whole folder") from error
    if not isinstance(values, dict):
        raise WeightSyncError(f"{path}: holds no JSON object; give a whole folder")
    return values
