"""Engine-level offload: an idle engine's device memory moves to the host and back.

Storages are emptied, not replaced: every parameter, view, DTensor and optimizer state keeps its
identity, also those that FSDP2 holds of its own. What lies in host memory anyway (offload_params,
the per-layer step) stays where it is. An `EngineMemory` knows its own engine only, so engines of
one process may differ.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from fsdpbench.engine.device import Device, DeviceMemory
from fsdpbench.engine.host_memory import HostRegions
from fsdpbench.engine.optim.shards import local_tensor
from fsdpbench.engine.optim.transfers import align
from fsdpbench.engine.parallel.agreement import Agreement
from fsdpbench.errors import FsdpbenchError, PeerError
from fsdpbench.log import get_logger
from fsdpbench.units import format_bytes, format_seconds

SLAB_BYTES = 1 << 30  # host memory is locked in slabs of this size, several at a time
logger = get_logger(__name__)


class Residence(Enum):
    """Where an engine's memory is."""

    DEVICE = "device"
    HOST = "host"


class EngineMemory:
    """Parameters, buffers, gradients and optimizer states of one engine, and where they are.

    The host memory is allocated and page-locked by the first offload, which takes seconds, and kept
    for the next ones until `close`. Each rank moves its own shards. The ranks of a `group`, which
    serves CPU tensors, move together: if one has no room, all stay as they were and raise.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        device: Device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.model, self.optimizer, self.device, self.group = model, optimizer, device, group
        self.residence = Residence.DEVICE
        self._regions = HostRegions(device)
        self._slabs: list[torch.Tensor] = []
        self._parked: list[tuple[torch.Tensor, torch.Tensor]] = []  # bytes here, bytes on the host

    @property
    def is_offloaded(self) -> bool:
        """True while the engine cannot compute."""
        return self.residence is Residence.HOST

    def check_onloaded(self, what: str) -> None:
        """Raise FsdpbenchError when the engine is offloaded; `what` was about to use its memory."""
        if self.is_offloaded:
            raise FsdpbenchError(
                f"{what}: the engine is offloaded, its memory is on the host. Call onload() first, "
                "or put the call into `with engine.onloaded():`."
            )

    def offload(self) -> None:
        """Move everything to the host and give the device memory back; nothing if it is there.

        Gathered parameters are dropped. If the host has no room for it all, nothing has changed.
        Collective over: the group.
        """
        self._move(Residence.HOST)

    def onload(self) -> None:
        """Bring everything back to the device; nothing if it is there.

        If the device has no room for it all, the engine stays offloaded and whole.
        Collective over: the group.
        """
        self._move(Residence.DEVICE)

    def _to_host(self) -> None:
        started, before = time.perf_counter(), self.device.memory_stats()
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        here = self._find_device_memory()
        parked = list(zip(here, self._reserve([run.numel() for run in here]), strict=True))
        self._regions.wait()
        for run, host in parked:
            host.copy_(run, non_blocking=True)
        self.device.synchronize()
        for run in here:
            run.untyped_storage().resize_(0)
        self.device.empty_cache()
        self._parked, self.residence = parked, Residence.HOST
        self._log("offloaded", parked, started, before)

    def _to_device(self) -> None:
        started, before = time.perf_counter(), self.device.memory_stats()
        with ExitStack() as undo:
            undo.callback(self.device.empty_cache)
            for run, _ in self._parked:
                run.untyped_storage().resize_(run.numel())
                undo.callback(run.untyped_storage().resize_, 0)
            for run, host in self._parked:
                run.copy_(host, non_blocking=True)
            self.device.synchronize()
            undo.pop_all()
        parked, self._parked, self.residence = self._parked, [], Residence.DEVICE
        self._log("onloaded", parked, started, before)

    @contextmanager
    def offloaded(self) -> Iterator[None]:
        """Keep the engine offloaded in the `with` body, then as it was before. Re-entrant."""
        with self._residing(Residence.HOST):
            yield

    @contextmanager
    def onloaded(self) -> Iterator[None]:
        """Keep the engine on its device in the `with` body, then as it was before. Re-entrant."""
        with self._residing(Residence.DEVICE):
            yield

    def close(self) -> None:
        """Unlock and free the host memory; an offloaded engine is lost with it."""
        self._regions.close()
        self._slabs, self._parked = [], []

    @contextmanager
    def _residing(self, residence: Residence) -> Iterator[None]:
        before = self.residence
        self._move(residence)
        try:
            yield
        except BaseException:  # peers may know nothing of it: do not wait for them
            self._move(before, together=False)
            raise
        self._move(before)

    def _move(self, residence: Residence, *, together: bool = True) -> None:
        if residence is self.residence:
            return
        what, move, back = "onload", self._to_device, self._to_host
        if residence is Residence.HOST:
            what, move, back = "offload", self._to_host, self._to_device
        if self.group is None or not together:
            move()
            return
        try:
            with Agreement(what, self.group):
                move()
        except PeerError:
            back()
            raise

    @torch.no_grad()
    def _find_device_memory(self) -> list[torch.Tensor]:
        """View each storage of the engine on the device as bytes, once however many share it."""
        found: dict[int, torch.Tensor] = {}
        for tensor in self._tensors():
            shard = local_tensor(tensor)
            storage = shard.untyped_storage()
            # memory that somebody else owns (a mapped file or region) cannot be emptied
            if shard.device.type == self.device.type and storage.nbytes() and storage.resizable():
                run = torch.empty(0, dtype=torch.uint8, device=shard.device)
                found.setdefault(storage.data_ptr(), run.set_(storage))
        return list(found.values())

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self.model.buffers()
        for param in self.model.parameters():
            yield param
            if param.grad is not None:
                yield param.grad
        if self.optimizer is not None:
            for state in self.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def _reserve(self, sizes: list[int]) -> list[torch.Tensor]:
        """Find host memory for runs of bytes: in slabs of earlier offloads, then in new ones."""
        places = []
        slab, used, left = 0, 0, sum(map(align, sizes))
        for nbytes in sizes:
            while slab < len(self._slabs) and used + nbytes > self._slabs[slab].numel():
                slab, used = slab + 1, 0
            if slab == len(self._slabs):
                room = max(nbytes, min(SLAB_BYTES, left))
                self._slabs.append(self._regions.allocate((room,), torch.uint8))
            places.append(self._slabs[slab][used : used + nbytes])
            used += align(nbytes)
            left -= align(nbytes)
        return places

    def _log(
        self,
        verb: str,
        parked: list[tuple[torch.Tensor, torch.Tensor]],
        started: float,
        before: DeviceMemory,
    ) -> None:
        nbytes, seconds = sum(run.numel() for run, _ in parked), time.perf_counter() - started
        after = self.device.memory_stats()
        logger.info(
            "%s %s in %s; allocated %s before, %s now; reserved %s before, %s now",
            verb,
            format_bytes(nbytes),
            format_seconds(seconds),
            format_bytes(before.allocated_bytes),
            format_bytes(after.allocated_bytes),
            format_bytes(before.reserved_bytes),
            format_bytes(after.reserved_bytes),
        )
