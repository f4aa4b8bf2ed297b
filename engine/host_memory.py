"""Page-locked host memory as tensors, handed out at once and locked in the background.

A device copies at the full speed of the bus, and beside other work, only to and from locked pages.
torch's own pinned allocator rounds sizes up to powers of two and lets the caller wait for the
locking, which takes seconds for the states of a model. Here whole pages are mapped for each region,
and a thread locks them (`cudaHostRegister`) while the caller goes on.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from fsdpbench.engine.device import Device
from fsdpbench.errors import FsdpbenchError
from fsdpbench.log import get_logger, warn_once
from fsdpbench.units import format_bytes

PORTABLE = 1  # cudaHostRegisterPortable: locked for every CUDA context of the process
LOCKING_THREADS = 2  # the driver takes turns; a second thread keeps it busy
logger = get_logger(__name__)


class HostRegions:
    """Regions of host memory that copy fast to and from `device`; plain memory for a CPU device.

    Regions stay valid tensors after `close` (or the end of this object), in ordinary memory then.
    """

    def __init__(self, device: Device) -> None:
        if device.type == "cuda" and device.index is None:
            device = Device("cuda", device.module.current_device())
        self.device = device
        self._ledger = _Ledger()
        self._pending: list[tuple[int, Future[int]]] = []  # bytes, CUDA error or 0
        self._threads: ThreadPoolExecutor | None = None
        self._finalizer = weakref.finalize(self, self._ledger.close)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor of zeros in memory of its own.

        Pages get memory when they are first touched or locked, so this takes no time.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        region = torch.frombuffer(_map_pages(nbytes), dtype=torch.uint8)
        if self.device.type == "cuda":
            if self._threads is None:
                self._threads = ThreadPoolExecutor(LOCKING_THREADS, thread_name_prefix="page-lock")
            future = self._threads.submit(self._ledger.lock, self.device, region)
            self._pending.append((region.nbytes, future))
        return region[:nbytes].view(dtype).view(shape)

    def wait(self) -> None:
        """Block until all regions are locked; those that cannot be are said once."""
        pending, self._pending = self._pending, []
        for nbytes, future in pending:
            error = future.result()
            if error:
                warn_once(
                    logger,
                    f"page-locking {format_bytes(nbytes)} of host memory failed with CUDA error "
                    f"{error}: copies to and from it are slower. Use less host memory, or raise "
                    "the limit of locked memory (ulimit -l).",
                )

    def close(self) -> None:
        """Unlock all regions and allocate no more; the device must have done its copies."""
        try:
            self.wait()
        finally:
            if self._threads is not None:
                self._threads.shutdown()
            self._finalizer()


class _Ledger:
    """Which regions are locked; outlives the `HostRegions` whose threads may still be locking."""

    def __init__(self) -> None:
        self.regions: list[torch.Tensor] = []
        self.closed = False
        self.mutex = threading.RLock()  # garbage collection may call `close` amid `lock`

    def lock(self, device: Device, region: torch.Tensor) -> int:
        device.make_current()  # a new thread is on device 0 and would make a context there
        error = int(_cudart().cudaHostRegister(region.data_ptr(), region.nbytes, PORTABLE))
        with self.mutex:
            if error == 0:
                self.regions.append(region)
            if self.closed:
                self.close()
        return error

    def close(self) -> None:
        with self.mutex:
            self.closed = True
            while self.regions:
                _cudart().cudaHostUnregister(self.regions.pop().data_ptr())


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _map_pages(nbytes: int) -> mmap.mmap:
    """Map zero pages that nobody else shares: locking works on whole pages."""
    nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise FsdpbenchError(
            f"host memory: {format_bytes(nbytes)} cannot be had ({error}). Use less of it: more "
            "ranks or machines, or fewer options that keep weights or states in host memory."
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages; they only make locking faster
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
