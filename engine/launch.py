"""Joining and leaving torch's default process group, and choosing this process's device.

A lone process (no launcher) becomes a world of one. Nothing here knows of engines.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from fsdpbench.engine.device import Device
from fsdpbench.ranks import read_ranks

TIMEOUT = timedelta(minutes=30)  # as long as the slowest checkpoint write may keep a rank away


def join_process_group(device_type: str | None = None) -> tuple[Device, bool]:
    """Initialise the default group if there is none; return the device and whether we made it.

    Collective over: the world. On an accelerator two backends serve one group: the device's for
    its tensors and gloo for host tensors (offloaded shards, host agreement).
    """
    ranks = read_ranks()
    joined = dist.is_initialized()
    device_type = device_type or choose_device_type(joined)
    index = None
    if device_type != "cpu":
        # whoever made the group without a launcher chose this process's device, too
        chosen = joined and not ranks.launched
        index = torch.accelerator.current_device_index() if chosen else ranks.local_rank
    device = Device(device_type, index)
    device.make_current()
    if joined:
        return device, False
    native = dist.get_default_backend_for_device(device.torch_device)
    backend = "gloo" if native == "gloo" else f"cpu:gloo,{device_type}:{native}"
    if ranks.launched:
        dist.init_process_group(backend, timeout=TIMEOUT)
    else:
        dist.init_process_group(
            backend,
            store=dist.HashStore(),  # type: ignore[attr-defined]  # public, missing in __all__
            rank=0,
            world_size=1,
            timeout=TIMEOUT,
        )
    return device, True


def choose_device_type(joined: bool) -> str:
    """Return the accelerator's type, or cpu where there is none or the group does not serve it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu"
    native = dist.get_default_backend_for_device(accelerator)
    if joined and f"{accelerator.type}:{native}" not in dist.get_backend_config():
        return "cpu"
    return accelerator.type


def leave_process_group() -> None:
    """Destroy the default process group if it is still there."""
    if dist.is_initialized():
        dist.destroy_process_group()
