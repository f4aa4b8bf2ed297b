"""Reading `.metadata`, torch's table of a sharded checkpoint, without running what it says.

The file is a pickle, and a pickle may name any callable. Torch's reader would call it; this one
knows the classes that such a table consists of and refuses all others. Values that are no tensors
are read with torch's own restricted loader.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from fsdpbench.engine.checkpoint.folders import DCP_METADATA
from fsdpbench.errors import CheckpointError

READER_THREADS = 4
TABLE = "torch.distributed.checkpoint.metadata"
KNOWN = {
    (TABLE, "Metadata"),
    (TABLE, "TensorStorageMetadata"),
    (TABLE, "BytesStorageMetadata"),
    (TABLE, "ChunkStorageMetadata"),
    (TABLE, "TensorProperties"),
    (TABLE, "_MEM_FORMAT_ENCODING"),
    (TABLE, "MetadataIndex"),
    (TABLE, "StorageMeta"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # as Python 3.13 calls it
    ("collections", "OrderedDict"),
}

BROKEN = (  # what pickle raises on bytes that are no pickle, or half of one, and `check_table`
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    ImportError,
    MemoryError,
    RuntimeError,
    AssertionError,
    OSError,
)


class MetadataUnpickler(pickle.Unpickler):
    """An unpickler for the classes of torch's table and dtypes alone."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return a known class; UnpicklingError for anything else."""
        if (module_name, global_name) in KNOWN:
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        raise pickle.UnpicklingError(
            f"it asks for {module_name}.{global_name}, which no table of tensors needs"
        )


def read_metadata(folder: Path) -> Metadata:
    """Read the folder's table; CheckpointError if it is missing, cut short or of another kind."""
    file = folder / DCP_METADATA
    try:
        content = file.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} lacks {DCP_METADATA}, which is written last: its save did not end, or its "
            "copy left hidden files out. Take an older checkpoint, or copy it anew."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    try:
        metadata: Metadata = MetadataUnpickler(io.BytesIO(content)).load()
        check_table(metadata)
    except BROKEN as error:
        raise CheckpointError(
            f"{file} cannot be read: {error or type(error).__name__}. It is damaged or no table of "
            "a sharded checkpoint; take an older checkpoint."
        ) from error
    return metadata


def check_table(metadata: Any) -> None:
    """Raise ValueError or its kin unless the fields are such as torch writes.

    The pieces of a tensor must have as many elements as the tensor: torch would leave what lies
    between them as it was, and say nothing.
    """
    if not isinstance(metadata, Metadata):
        raise TypeError("it holds no table")
    for index, place in metadata.storage_data.items():
        check_numbers(index.fqn, [place.offset, place.length])
        if not isinstance(place.relative_path, str):
            raise TypeError(f"{index.fqn} lies in {place.relative_path!r}")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        check_numbers(name, entry.size)
        stored = 0
        for chunk in entry.chunks:
            check_numbers(name, [*chunk.offsets, *chunk.sizes])
            bounds = zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
            if any(offset + size > whole for offset, size, whole in bounds):
                raise ValueError(f"a piece of {name} lies outside of it")
            stored += math.prod(chunk.sizes)
        if stored != math.prod(entry.size):
            raise ValueError(f"the pieces of {name} are not the whole of it")


def check_numbers(name: str, numbers: Iterable[Any]) -> None:
    """Raise ValueError unless these are counts."""
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"{name} has sizes or places that are no counts")


class CheckedReader(FileSystemReader):
    """Torch's reader over a table that was read safely; files are read by several threads."""

    def __init__(self, folder: Path, metadata: Metadata, num_threads: int = READER_THREADS) -> None:
        super().__init__(folder)
        self.metadata, self.num_threads = metadata, num_threads

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the table at hand."""
        if self.metadata.storage_meta is None:
            self.metadata.storage_meta = StorageMeta()
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the planned items; neighbours in a file stay with one thread."""
        items = sorted(plan.items, key=self._place_of)
        share = -(-len(items) // self.num_threads) or 1
        parts = [items[start : start + share] for start in range(0, len(items), share)]
        with ThreadPoolExecutor(max(1, len(parts))) as pool:
            read = super().read_data
            for reading in [pool.submit(read, LoadPlan(part), planner) for part in parts]:
                reading.result()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place_of(self, item: ReadItem) -> tuple[str, int]:
        place = self.metadata.storage_data[item.storage_index]
        return place.relative_path, place.offset


class CheckedPlanner(DefaultLoadPlanner):
    """Torch's planner, with its restricted loader for values that are no tensors."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put one value into the state dict, if it is made of plain types."""
        try:
            content = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            name = read_item.dest_index.fqn
            raise CheckpointError(f"{name} of the checkpoint is no plain value: {error}") from error
        value.seek(0)
        value.truncate()
        torch.save(content, value)  # now torch's own loader meets plain types only
        value.seek(0)
        super().load_bytes(read_item, value)
