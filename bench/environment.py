"""Facts about the machine and the code that a record carries, and the devices a sweep may use.

An allow-list: nothing is copied from the environment wholesale, and no host or user name is kept.
What only a process with torch knows (NCCL, CUDA) comes from the worker's outcome.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pynvml

import fsdpbench

PACKAGES = ("torch", "transformers", "safetensors", "numpy", "flash-attn", "flash-attn-4", "triton")
GIT_SECONDS = 20.0  # a status on a cold disk may take long; then the commit is unknown


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver lists it."""

    name: str
    total_bytes: int


@dataclass(frozen=True)
class Revision:
    """The commit of this product's own source; None where it is no git checkout."""

    commit: str | None = None
    dirty: bool | None = None


def list_gpus() -> tuple[list[Gpu], str | None]:
    """Return the GPUs that CUDA would show, in NVML's order, and the driver's version."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return [], None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        gpus = [
            Gpu(pynvml.nvmlDeviceGetName(h), int(pynvml.nvmlDeviceGetMemoryInfo(h).total))
            for h in handles
        ]
        driver = str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return [], None
    finally:
        pynvml.nvmlShutdown()
    return _keep_visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES")), driver


def _keep_visible(gpus: list[Gpu], visible: str | None) -> list[Gpu]:
    """Apply CUDA_VISIBLE_DEVICES: indices end at the first that is no GPU, as CUDA has it."""
    if visible is None:
        return gpus
    kept: list[Gpu] = []
    for entry in visible.split(","):
        name = entry.strip()
        if name.isdigit() and int(name) < len(gpus):
            kept.append(gpus[int(name)])
        elif name.startswith(("GPU-", "MIG-")) and gpus:
            kept.append(gpus[0])
        else:
            break
    return kept


def describe_environment() -> dict[str, Any]:
    """Return the allow-listed facts of this machine and installation, ready for JSON."""
    gpus, driver = list_gpus()
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _read_cpu_model(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [gpu.name for gpu in gpus],
        "driver": driver,
        "fsdpbench": fsdpbench.__version__,
        **{name.replace("-", "_"): _find_version(name) for name in PACKAGES},
    }
    hardware = [facts[name] for name in ("cpu", "cpu_count", "memory_bytes", "gpus")]
    facts["machine"] = hashlib.sha256(repr(hardware).encode()).hexdigest()[:12]
    return {name: value for name, value in facts.items() if value is not None}


def _read_cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or None


def _find_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def read_revision() -> Revision:
    """Return the commit of the source that runs, and whether tracked files differ from it."""
    root = Path(fsdpbench.__file__).resolve().parent.parent
    # an installation inside somebody's repository is not that repository's code
    if _git(root, "ls-files", "--error-unmatch", "fsdpbench/__init__.py") is None:
        return Revision()
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return Revision(commit, None if changes is None else bool(changes))


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
