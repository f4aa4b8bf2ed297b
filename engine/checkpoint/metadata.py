"""Reading `.metadata`, torch's table of a sharded checkpoint, without running what it says.

The file is a pickle, and a pickle may name any callable. Torch's reader would call it; this one
knows the classes that such a table consists of and refuses all others. Values that are no tensors
are read with torch's own restricted loader.
"""

from __future__ import annotations

import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
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
BROKEN = (  # what pickle raises on bytes that are no pickle, or half of one
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
    IndexError,
    ImportError,
    MemoryError,
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
        metadata = MetadataUnpickler(io.BytesIO(content)).load()
    except BROKEN as error:
        raise CheckpointError(
            f"{file} cannot be read: {error or type(error).__name__}. It is damaged or no table of "
            "a sharded checkpoint; take an older checkpoint."
        ) from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{file} cannot be read: it holds no table of a sharded checkpoint.")
    return metadata


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
