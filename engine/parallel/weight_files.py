"""A folder of safetensors by its headers: which bytes of which file each tensor is.

One file or several with `model.safetensors.index.json`, as transformers writes them. Headers are
read and checked here (format: https://github.com/huggingface/safetensors#format); the values are
read with plain positioned reads, which reach a cached file faster than a mapping's page faults do.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdpbench.engine.parallel.regions import Region, shape_of
from fsdpbench.engine.parallel.weight_buckets import Span
from fsdpbench.errors import CheckpointError, list_names

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PREFIX_BYTES = 8  # the header's length, little-endian
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
# what a master weight can be made of
FLOATING = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# bits of an element, for the bounds of tensors that are listed but cannot be weights
ELEMENT_BITS = {
    **{"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "U64": 64, "C64": 64},
    **{"I32": 32, "U32": 32, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8},
    **{"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
    **{"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4},
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies; row-major, without gaps."""

    name: str
    kind: str  # the file's word for the dtype
    shape: torch.Size
    file: Path
    offset_bytes: int  # of the first element, from the start of the file
    num_bytes: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in torch's words; only of tensors that passed `check_names`."""
        return FLOATING[self.kind]


class SafetensorsWeights:
    """A source of values: the tensors of one checkpoint folder, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file_of = find_tensors(folder)  # tensor name -> file
        self._headers: dict[Path, dict[str, StoredTensor]] = {}

    def locate(self, name: str) -> StoredTensor:
        """Say where a tensor lies; its file's header is read at the first question."""
        file = self.file_of[name]
        if file not in self._headers:
            self._headers[file] = read_header(file)
        if name not in self._headers[file]:  # the index names a tensor that the file lacks
            raise CheckpointError(f"{file} cannot be read: it lacks {name}, which the index names.")
        return self._headers[file][name]

    def check_names(self, shapes: Mapping[str, torch.Size]) -> None:
        """Raise CheckpointError naming what is missing, of another shape or not of numbers."""
        stored = [self.locate(name) for name in shapes if name in self.file_of]
        problems = describe_mismatch(shapes, {tensor.name: tensor.shape for tensor in stored})
        quantized = [f"{t.name} ({t.kind})" for t in stored if t.kind not in FLOATING]
        if quantized:
            problems.append(f"neither of {', '.join(FLOATING)}: {list_names(quantized)}")
        if problems:
            raise CheckpointError(
                f"{self.folder}: {'; '.join(problems)}. "
                "The weights belong to another model than config.json says."
            )

    def locate_rows(self, name: str, rows: slice) -> Span:
        """Say where rows of a tensor lie."""
        stored = self.locate(name)
        shape = tuple(stored.shape) or (1,)
        return Span(name, stored.dtype, shape, rows, str(stored.file), stored.offset_bytes)

    @property
    def origin(self) -> str:
        """The folder, for messages."""
        return str(self.folder)

    def find_unused(self, names: Collection[str]) -> list[str]:
        """List the tensors of the files that a model of these names does not read."""
        return [name for name in self.file_of if name not in names]

    def read(self, name: str, shape: torch.Size, region: Region) -> torch.Tensor:
        """Read the region of a tensor into host memory, in the file's dtype."""
        stored = self.locate(name)
        if 0 in shape_of(region):
            return torch.empty(shape_of(region), dtype=stored.dtype)
        if not region:  # one number
            return self.read(name, torch.Size([1]), (slice(0, 1),)).view(())
        row_bytes = stored.num_bytes // shape[0]
        rows, *other_dims = region
        memory = torch.empty((rows.stop - rows.start) * row_bytes, dtype=torch.uint8)
        with stored.file.open("rb", buffering=0) as file:
            read_exactly(
                file.fileno(),
                memory.numpy().data,
                stored.offset_bytes + rows.start * row_bytes,
                stored.file,
            )
        whole_rows = memory.view(stored.dtype).view(-1, *shape[1:])
        return whole_rows[(slice(None), *other_dims)].contiguous()


def describe_mismatch(
    expected: Mapping[str, torch.Size], found: Mapping[str, torch.Size]
) -> list[str]:
    """Say in words how the tensors of a file differ from those of a model; [] if they do not.

    One phrase each for missing, unexpected and mis-shaped names, with the first five of each. Who
    allows unexpected names leaves them out of `found`.
    """
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    wrong = [
        f"{name} (file {list(found[name])}, model {list(shape)})"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    phrases = {"missing": missing, "unexpected": unexpected, "of another shape:": wrong}
    return [f"{phrase} {list_names(names)}" for phrase, names in phrases.items() if names]


def read_exactly(descriptor: int, target: memoryview, offset_bytes: int, file: Path) -> None:
    """Fill `target` with the file's bytes from an offset on; CheckpointError if there are fewer."""
    done = 0
    while done < len(target):
        try:
            count = os.preadv(descriptor, [target[done:]], offset_bytes + done)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        if count == 0:
            end = offset_bytes + done
            raise CheckpointError(f"{file} cannot be read: it ends at byte {end}, amid a tensor.")
        done += count


def find_tensors(folder: Path) -> dict[str, Path]:
    """Map each tensor of a checkpoint folder to its file."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():  # first, as in transformers
        return dict.fromkeys(read_header(single), single)
    if not index.is_file():
        raise CheckpointError(
            f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}. "
            "Give a folder with safetensors weights, or set init_from_scratch to true."
        )
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: folder / file for name, file in names.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r}") from error
    outside = [str(names[name]) for name, file in files.items() if file.parent != folder]
    if outside:
        raise CheckpointError(f"{index} cannot be read: it names files elsewhere: {outside[0]}")
    absent = sorted({file.name for file in files.values() if not file.is_file()})
    if absent:
        raise CheckpointError(f"{folder} lacks {list_names(absent)}, which {INDEX_FILE} names.")
    return files


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Read which tensors a file holds; CheckpointError unless they fill it exactly."""
    try:
        with file.open("rb") as content:
            file_bytes = os.fstat(content.fileno()).st_size
            prefix = content.read(PREFIX_BYTES)
            header_bytes = int.from_bytes(prefix, "little")
            limit = min(MAX_HEADER_BYTES, file_bytes - PREFIX_BYTES)
            if len(prefix) < PREFIX_BYTES or not 2 <= header_bytes <= limit:
                raise CheckpointError(
                    f"{file} cannot be read: {file_bytes} bytes with a header of {header_bytes}. "
                    "It is no safetensors file, or only the start of one."
                )
            text = content.read(header_bytes)
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=build_without_repetition)
        if not isinstance(entries, dict):
            raise TypeError("its header is no JSON object")  # noqa: TRY301  # one message below
        entries.pop("__metadata__", None)
        start = PREFIX_BYTES + header_bytes
        tensors = [parse_entry(name, entry, file, start) for name, entry in entries.items()]
    except (ValueError, TypeError, KeyError, RecursionError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    check_extents(tensors, file, start, file_bytes)
    return {tensor.name: tensor for tensor in tensors}


def build_without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; ValueError if it has a key twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("its header names something twice")
    return content


def parse_entry(name: str, entry: Any, file: Path, data_start: int) -> StoredTensor:
    """Check one entry of a header by itself; ValueError or its kin if it is wrong."""
    kind, shape = entry["dtype"], entry["shape"]
    first, end = entry["data_offsets"]
    numbers = [*shape, first, end]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"{name} has shape {shape} at {[first, end]}")
    if kind not in ELEMENT_BITS:
        raise ValueError(f"{name} has the unknown dtype {kind!r}")
    needed_bits = math.prod(shape) * ELEMENT_BITS[kind]
    if (end - first) * 8 != needed_bits:
        raise ValueError(f"{name} ({kind} {shape}) lies at {[first, end]}, which does not fit it")
    return StoredTensor(name, kind, torch.Size(shape), file, data_start + first, end - first)


def check_extents(
    tensors: Iterable[StoredTensor], file: Path, data_start: int, file_bytes: int
) -> None:
    """Refuse overlaps, gaps and an end that is not the file's."""
    position = data_start
    for tensor in sorted(tensors, key=lambda t: (t.offset_bytes, t.num_bytes)):
        if tensor.offset_bytes != position:
            raise CheckpointError(
                f"{file} cannot be read: {tensor.name} starts at byte {tensor.offset_bytes}, "
                f"and what lies before it ends at {position}."
            )
        position += tensor.num_bytes
    if position != file_bytes:
        state = "truncated" if file_bytes < position else "longer than its header says"
        raise CheckpointError(
            f"{file} cannot be read: it is {state} ({file_bytes} bytes, should be {position})."
        )
