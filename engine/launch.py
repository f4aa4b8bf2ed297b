"""Joining and leaving torch's default process group, and choosing this process's device.

A lone process (no launcher) becomes a world of one. Nothing here knows of engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from fsdpbench.engine.device import Device
from fsdpbench.log import get_logger, warn_once
from fsdpbench.ranks import read_ranks

logger = get_logger(__name__)

TIMEOUT = timedelta(minutes=30)  # as long as the slowest checkpoint write may keep a rank away


@dataclass
class OwnGroup:
    """The default group as made here, and how many use it: the last one to leave ends it."""

    group: dist.ProcessGroup
    num_users: int


# torch has one default group a process; this is the record of it
_own: list[OwnGroup] = []


def join_process_group(device_type: str | None = None) -> tuple[Device, bool]:
    """Initialise the default group if there is none; return the device and whether we made it.

    Each call is to be matched by one of `leave_process_group`.
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
        for own in _own:
            own.num_users += own.group is dist.group.WORLD
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
    world = dist.group.WORLD
    assert world is not None  # made above
    _own[:] = [OwnGroup(world, num_users=1)]
    return device, True


def choose_device_type(joined: bool) -> str:
    """Return the accelerator's type, or cpu where there is none or the group does not serve it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu"
    native = dist.get_default_backend_for_device(accelerator)
    if joined and f"{accelerator.type}:{native}" not in dist.get_backend_config():
        warn_once(
            logger,
            f"training on the CPU: the default process group does not serve {accelerator.type}; "
            f"initialise it with cpu:gloo,{accelerator.type}:{native} to use the accelerator",
        )
        return "cpu"
    return accelerator.type


def leave_process_group() -> None:
    """Destroy the default process group if it was made here and its last user leaves."""
    for own in list(_own):
        own.num_users -= 1
        if own.num_users > 0:
            continue
        _own.remove(own)
        if dist.is_initialized() and own.group is dist.group.WORLD:
            dist.destroy_process_group()
