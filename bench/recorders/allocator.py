"""The device allocator's own counters, as samples."""

from __future__ import annotations

from fsdpbench.bench.recorders.sampler import Sample
from fsdpbench.engine.device import Device


class AllocatorRecorder:
    """Samples what torch's caching allocator holds on this rank's device."""

    source = "allocator"

    def __init__(self, device: Device) -> None:
        self._device = device
        self.unavailable = (
            None
            if device.is_asynchronous
            else f"torch keeps no allocator counters on {device.type}"
        )

    def sample(self) -> Sample:
        """Return allocated, reserved and peak bytes, and how often an allocation was retried."""
        try:
            memory = self._device.memory_stats()
        except RuntimeError as error:  # a device in an error state answers no question
            return {"refused": str(error).partition("\n")[0]}
        return {
            "allocated_bytes": memory.allocated_bytes,
            "reserved_bytes": memory.reserved_bytes,
            "peak_allocated_bytes": memory.peak_allocated_bytes,
            "num_alloc_retries": memory.num_alloc_retries,
        }
