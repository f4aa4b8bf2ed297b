"""Watches the storages of the simulated device come and go while the engine runs.

A storage counts from the first operator that returns it until Python's last reference to it is
gone, which is when torch would free it. Nothing here knows of the engine but the operators' names.

Note: what a block is for. Owners name theirs (parameters, optimizer states, gradients) after a
phase; operators of FSDP2 tell their buffers; what the forward pass leaves behind is an activation,
and so is what is computed while gradients are recorded in the backward pass (a recomputation). The
rest is temporary.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdpbench.bench.predict.accumulation import plan_accumulation
from fsdpbench.bench.predict.events import MemoryEvent
from fsdpbench.bench.predict.fake_mode import WRAPPERS
from fsdpbench.bench.predict.simulated_device import current_stream
from fsdpbench.bench.predict.trace import Category, PhaseMark
from fsdpbench.bench.predict.workspaces import (
    CUBLAS_BYTES,
    MATMULS,
    Architecture,
    plan_workspaces,
)

FSDP_OPERATORS = ("fsdp::", "c10d::")
HEAD_NODE = "_FusedLogprobs"  # autograd's name of what makes logits, in the backward pass
RESIZE = "resize_"


@dataclass
class _Held:
    """One live storage; `block_id` is None while it has no bytes."""

    storage: weakref.ref[Any]
    num_bytes: int
    block_id: int | None


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each allocation and free of one device type, by phase and stream."""

    def __init__(self, device_type: str, architecture: Architecture | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type = device_type
        self.architecture = architecture  # None: no kernel takes workspace
        self.events: list[MemoryEvent] = []
        self.categories: dict[int, Category] = {}
        self.marks = [PhaseMark(0, "build", 0)]
        self.in_head = False  # the forward pass is past the decoder
        self._held: dict[int, _Held] = {}
        self._allocated: dict[int, MemoryEvent] = {}
        self._born_in_forward: set[int] = set()
        self._cublas: set[tuple[int, int]] = set()
        self._pauses = 0
        self._lock = threading.RLock()  # autograd has a thread of its own

    # ---- phases -------------------------------------------------------------------------------

    def enter_phase(self, step: int, phase: str) -> None:
        """Count what follows for another phase."""
        gc.collect()
        with self._lock:
            for block_id in self._born_in_forward & self._allocated.keys():
                if self.categories[block_id] is Category.TEMPORARIES:
                    self.categories[block_id] = Category.ACTIVATIONS
            self._born_in_forward.clear()
            self.in_head = False
            self.marks.append(PhaseMark(step, phase, len(self.events)))

    def claim(self, tensors: Iterable[torch.Tensor], category: Category) -> None:
        """Say what the memory of these tensors is for, from its beginning."""
        with self._lock:
            for tensor in tensors:
                held = self._held.get(id(tensor.untyped_storage()))
                if held is not None and held.block_id is not None:
                    self.categories[held.block_id] = category

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Take no notice of tensors in the `with` body."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    # ---- storages -----------------------------------------------------------------------------

    def note_resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """A storage was given other bytes: the old block goes before the new one comes."""
        with self._lock:
            held = self._held.get(id(storage))
            if held is None or held.storage() is not storage:
                return
            if held.block_id is not None:
                self._free(held.block_id)
            held.num_bytes = num_bytes
            held.block_id = self._allocate(num_bytes, RESIZE) if num_bytes else None

    def _see(self, tensor: torch.Tensor, operator: str) -> None:
        if tensor.device.type != self.device_type:
            return
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        with self._lock:
            held = self._held.get(id(storage))
            if held is not None and held.storage() is storage:
                if held.num_bytes != num_bytes:
                    self.note_resize(storage, num_bytes)
                return
            block_id = self._allocate(num_bytes, operator) if num_bytes else None
            gone = functools.partial(self._gone, id(storage))
            self._held[id(storage)] = _Held(weakref.ref(storage, gone), num_bytes, block_id)

    def _gone(self, key: int, reference: Any) -> None:
        with self._lock:
            held = self._held.get(key)
            if held is None or held.storage is not reference:
                return
            del self._held[key]
            if held.block_id is not None:
                self._free(held.block_id)

    def _allocate(self, num_bytes: int, operator: str) -> int:
        block_id = len(self.categories)
        event = MemoryEvent("alloc", block_id, num_bytes, current_stream().stream_id)
        self.events.append(event)
        self._allocated[block_id] = event
        self.categories[block_id] = self._categorise(operator)
        if self.marks[-1].phase == "forward":
            self._born_in_forward.add(block_id)
        return block_id

    def _free(self, block_id: int) -> None:
        self.events.append(self._allocated.pop(block_id)._replace(kind="free"))

    def _categorise(self, operator: str) -> Category:
        if operator == RESIZE or operator.startswith(FSDP_OPERATORS):
            return Category.FSDP_BUFFERS
        phase = self.marks[-1].phase
        if phase == "forward" and self.in_head:
            return Category.LOGITS_AND_LOSS
        if phase == "backward":
            node = torch._C._current_autograd_node()
            if node is not None and HEAD_NODE in node.name():
                return Category.LOGITS_AND_LOSS
            if torch.is_grad_enabled():
                return Category.ACTIVATIONS
        return Category.TEMPORARIES

    # ---- operators ----------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, WRAPPERS) for kind in types):
            return NotImplemented  # the tensors inside come by one by one
        if self._pauses:
            return func(*args, **(kwargs or {}))
        operator = func._schema.name
        if self.architecture is not None and operator in MATMULS:
            self._open_cublas(args[0])
        accumulated = plan_accumulation(func, args)
        if accumulated is not None:
            func, args = torch.ops.aten.add_.Tensor, accumulated
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, operator)
        if self.architecture is not None:
            self._use_workspaces(plan_workspaces(operator, args))
        return result

    def _open_cublas(self, tensor: torch.Tensor) -> None:
        """Give cuBLAS its workspace on the first product of a thread and stream."""
        handle = (threading.get_ident(), current_stream().stream_id)
        if tensor.device.type != self.device_type or handle in self._cublas:
            return
        assert self.architecture is not None  # the caller asked
        self._cublas.add(handle)
        with self._lock:
            block_id = self._allocate(CUBLAS_BYTES[self.architecture], "cublas")
            self.categories[block_id] = Category.WORKSPACES

    def _use_workspaces(self, sizes: Sequence[int]) -> None:
        with self._lock:
            block_ids = [self._allocate(size, "workspace") for size in sizes]
            for block_id in block_ids:
                self.categories[block_id] = Category.WORKSPACES
                self._free(block_id)
