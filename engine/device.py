"""The one module that knows on what hardware the engine runs.

Streams, events, synchronisation and memory statistics of a device type, reached through
`torch.get_device_module`, so that an out-of-tree device works as CUDA does. On the CPU streams and
events do nothing and memory numbers are zero or None. Nothing is touched at import or construction.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fsdpbench.errors import ConfigError, Violation


# Looked up for each span and event; torch works the answers out anew each time.
@cache
def _device_module(kind: str) -> Any:
    return torch.get_device_module(kind)


@cache
def _torch_device(kind: str, index: int | None) -> torch.device:
    return torch.device(kind) if index is None else torch.device(kind, index)


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one device: the allocator's numbers of this process, and the whole device's."""

    allocated_bytes: int = 0
    reserved_bytes: int = 0
    peak_allocated_bytes: int = 0  # since the start or the last `reset_peaks`
    peak_reserved_bytes: int = 0
    num_alloc_retries: int = 0
    total_bytes: int | None = None
    free_bytes: int | None = None  # counts what other processes hold, too


@dataclass(frozen=True)
class Device:
    """A device type and, where there are several, the index of this process's own."""

    type: str
    index: int | None = None

    def __post_init__(self) -> None:
        known = "cpu, cuda, or a type that an installed extension registers"
        violation = Violation("device", repr(self.type), known)
        if not self.type.isidentifier():  # torch would cut "cuda:0" at the colon
            raise ConfigError([violation])
        try:
            _device_module(self.type)
        except RuntimeError as error:
            raise ConfigError([violation]) from error

    @property
    def torch_device(self) -> torch.device:
        """The device in torch's words; without an index it means the current one of its type."""
        return _torch_device(self.type, self.index)

    @property
    def is_asynchronous(self) -> bool:
        """Whether work is enqueued on the device while the host runs on."""
        return self.type != "cpu"

    @property
    def module(self) -> Any:
        """torch's module of this device type (`torch.cuda`, `torch.cpu`, ...)."""
        return _device_module(self.type)

    def make_current(self) -> None:
        """Make this the process's current device; does nothing without an index."""
        if self.index is not None and self.is_asynchronous:
            self.module.set_device(self.index)

    def stream(self) -> Any:
        """Create a side stream of this device."""
        if not self.is_asynchronous:
            return self.module.Stream()
        return self.module.Stream(device=self.torch_device)

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Enqueue the work of the `with` body on `stream`."""
        context: AbstractContextManager[Any] = self.module.stream(stream)
        return context

    def current_stream(self) -> Any:
        """Return the stream that work is enqueued on now."""
        return self.module.current_stream(self.torch_device if self.is_asynchronous else None)

    def event(self, timing: bool = False) -> Any:
        """Create an event; with `timing` two of them tell the milliseconds between them."""
        if not self.is_asynchronous:
            return self.module.Event()
        return self.module.Event(enable_timing=timing)

    def synchronize(self) -> None:
        """Block the host until the device has done all work enqueued so far."""
        self.module.synchronize(self.torch_device if self.is_asynchronous else None)

    def memory_stats(self) -> DeviceMemory:
        """Read the allocator's counters and the device's totals; no synchronisation."""
        if not self.is_asynchronous:
            return DeviceMemory()
        read = getattr(self.module, "memory_stats", None)
        stats = read(self.torch_device) if read else {}
        info = getattr(self.module, "mem_get_info", None)
        free_bytes, total_bytes = info(self.torch_device) if info else (None, None)
        return DeviceMemory(
            allocated_bytes=stats.get("allocated_bytes.all.current", 0),
            reserved_bytes=stats.get("reserved_bytes.all.current", 0),
            peak_allocated_bytes=stats.get("allocated_bytes.all.peak", 0),
            peak_reserved_bytes=stats.get("reserved_bytes.all.peak", 0),
            num_alloc_retries=stats.get("num_alloc_retries", 0),
            total_bytes=total_bytes,
            free_bytes=free_bytes,
        )

    def reset_peaks(self) -> None:
        """Start the peaks of `memory_stats` anew from the present use."""
        reset = getattr(self.module, "reset_peak_memory_stats", None)
        if reset:
            reset(self.torch_device)

    def empty_cache(self) -> None:
        """Give the allocator's unused blocks back to the device."""
        empty = getattr(self.module, "empty_cache", None)
        if empty:
            empty()

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor here; from the CPU through pinned memory, without waiting for the copy.

        The caller may drop the source at once: the pinned block is held until the copy is done.
        """
        if not self.is_asynchronous or tensor.device.type != "cpu":
            return tensor.to(self.torch_device)
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self.torch_device, non_blocking=True)

    def memory_snapshot_start(self, max_entries: int = 100_000) -> None:
        """Begin to record allocations with their stacks; the last `max_entries` are kept."""
        self._memory_recorder().memory._record_memory_history(max_entries=max_entries)

    def memory_snapshot_stop(self, path: str | Path) -> Path:
        """Write what was recorded (for pytorch.org/memory_viz) and end the recording."""
        recorder = self._memory_recorder().memory
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        recorder._dump_snapshot(str(target))
        recorder._record_memory_history(enabled=None)
        return target

    def _memory_recorder(self) -> Any:
        memory = getattr(self.module, "memory", None)
        if not hasattr(memory, "_record_memory_history"):
            allowed = "memory snapshots need a device whose allocator records them, such as cuda"
            raise ConfigError([Violation("device", repr(self.type), allowed)])
        return self.module
