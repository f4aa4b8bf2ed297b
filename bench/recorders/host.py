"""Memory and CPU of this process as the operating system sees them.

The peak is the kernel's own high-water mark (VmHWM), so no spike between two samples is missed.
Unique memory (USS) walks the page tables, which can take long in a large process: it is read on
request, between measurements, and samples repeat the last reading.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from fsdpbench.bench.recorders.sampler import Sample

STATUS_FILE = Path("/proc/self/status")
CLEAR_FILE = Path("/proc/self/clear_refs")
CLEAR_HIGH_WATER_MARK = "5"  # see proc_pid_clear_refs(5)


class HostRecorder:
    """Samples resident memory, CPU use and threads of this process."""

    source = "host"
    unavailable: str | None = None

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first call starts the measuring interval
        self._highest_rss_bytes = 0
        self._unique_bytes: int | None = None

    def sample(self) -> Sample:
        """Return resident bytes, threads, and CPU percent since the last sample (100: one core)."""
        with self._process.oneshot():
            rss_bytes = self._process.memory_info().rss
            cpu_percent = self._process.cpu_percent()
            num_threads = self._process.num_threads()
        self._highest_rss_bytes = max(self._highest_rss_bytes, rss_bytes)
        return {
            "rss_bytes": rss_bytes,
            "unique_bytes": self._unique_bytes,
            "cpu_percent": cpu_percent,
            "num_threads": num_threads,
            "machine_memory_percent": psutil.virtual_memory().percent,
        }

    def measure_peak(self) -> int:
        """Return the highest resident bytes of this process so far.

        Where the kernel keeps no high-water mark, the highest sample stands in for it.
        """
        peak = read_high_water_mark()
        if peak is not None:
            return peak
        return max(self._highest_rss_bytes, int(self._process.memory_info().rss))

    def reset_peak(self) -> None:
        """Let the peak count from now, where the system can do so."""
        self._highest_rss_bytes = 0
        try:
            CLEAR_FILE.write_text(CLEAR_HIGH_WATER_MARK, encoding="ascii")
        except OSError:  # no such file, or no right to write it: the peak is the whole process's
            return

    def measure_unique(self) -> int | None:
        """Return the bytes that no other process shares; None where the system does not say."""
        try:
            self._unique_bytes = int(self._process.memory_full_info().uss)
        except psutil.AccessDenied:
            self._unique_bytes = None
        return self._unique_bytes


def read_high_water_mark(status_file: Path = STATUS_FILE) -> int | None:
    """Return VmHWM in bytes; None on a system without it."""
    try:
        text = status_file.read_text(encoding="ascii")
    except FileNotFoundError:
        return None
    for line in text.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
