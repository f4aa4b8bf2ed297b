"""What the NVIDIA driver says about this rank's GPU: memory, load, power, clocks, throttling.

The driver's library may be missing, old or partly forbidden; no measurement may fail because of it.
Whatever cannot be read is None, and the first refusal of each field is kept as a reason. The GPU is
found by its UUID, since the driver's order of devices is not the process's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

from fsdpbench.bench.recorders.sampler import Sample

T = TypeVar("T")

# Bits of the driver's mask of reasons why clocks are not at their maximum (nvml.h).
CLOCK_REASONS: dict[int, str] = {
    0x1: "idle",
    0x2: "application_clocks",
    0x4: "power_cap",
    0x8: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "software_thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
    0x100: "display_clocks",
}


class NvmlRecorder:
    """Samples one GPU through a library with the functions of `pynvml`."""

    source = "nvml"

    def __init__(
        self, gpu_uuid: str | None, library: Any = pynvml, process_id: int | None = None
    ) -> None:
        self._library = library
        self._process_id = os.getpid() if process_id is None else process_id
        self._handle: Any = None
        self._highest_used_bytes: int | None = None
        self.missing: dict[str, str] = {}  # field -> why it could not be read
        self.unavailable = self._open(gpu_uuid)

    def _open(self, gpu_uuid: str | None) -> str | None:
        if gpu_uuid is None:
            return "this rank has no NVIDIA GPU"
        try:
            self._library.nvmlInit()
            self._handle = self._library.nvmlDeviceGetHandleByUUID(gpu_uuid)
        except self._library.NVMLError as error:
            return f"NVML: {error}"
        return None

    def sample(self) -> Sample:
        """Return the GPU's state; fields that the driver refuses are None."""
        library, handle = self._library, self._handle
        used_bytes = self._read("used_bytes", self._read_used_bytes)
        if used_bytes is not None:
            self._highest_used_bytes = max(self._highest_used_bytes or 0, used_bytes)
        rates = self._read("utilisation", lambda: library.nvmlDeviceGetUtilizationRates(handle))
        milliwatts = self._read("power", lambda: library.nvmlDeviceGetPowerUsage(handle))
        processes = self._read("processes", self._list_processes)
        return {
            "used_bytes": used_bytes,
            "process_bytes": self._find_own_bytes(processes),
            "num_processes": None if processes is None else len(processes),
            "utilisation_percent": None if rates is None else rates.gpu,
            "memory_utilisation_percent": None if rates is None else rates.memory,
            "power_watts": None if milliwatts is None else milliwatts / 1000,
            "sm_clock_megahertz": self._read_clock("NVML_CLOCK_SM"),
            "memory_clock_megahertz": self._read_clock("NVML_CLOCK_MEM"),
            "temperature_celsius": self._read(
                "temperature",
                lambda: library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU),
            ),
            "throttle_reasons": self._read("throttle_reasons", self._list_throttle_reasons),
        }

    def measure_peak(self) -> int | None:
        """Return the highest bytes in use on the GPU over all samples, other processes included."""
        return self._highest_used_bytes

    def read_driver_version(self) -> str | None:
        """Return the version of the driver."""
        if self.unavailable:
            return None
        version = self._read("driver", self._library.nvmlSystemGetDriverVersion)
        return version.decode() if isinstance(version, bytes) else version

    def _read(self, field: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except self._library.NVMLError as error:
            self.missing.setdefault(field, str(error))
            return None

    def _read_used_bytes(self) -> int:
        # version 2 counts as nvidia-smi does: what the driver reserves for itself is left out
        version = self._library.nvmlMemory_v2
        return int(self._library.nvmlDeviceGetMemoryInfo(self._handle, version=version).used)

    def _read_clock(self, name: str) -> int | None:
        library = self._library
        kind = getattr(library, name)
        return self._read("clocks", lambda: int(library.nvmlDeviceGetClockInfo(self._handle, kind)))

    def _list_processes(self) -> list[Any]:
        return list(self._library.nvmlDeviceGetComputeRunningProcesses(self._handle))

    def _find_own_bytes(self, processes: list[Any] | None) -> int | None:
        for process in processes or ():
            if process.pid == self._process_id:
                return None if process.usedGpuMemory is None else int(process.usedGpuMemory)
        if processes is not None:
            # a container's process numbers are not the driver's
            self.missing.setdefault("process_bytes", "the driver lists no process of this number")
        return None

    def _list_throttle_reasons(self) -> list[str]:
        mask = self._library.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        return [name for bit, name in CLOCK_REASONS.items() if mask & bit]
