"""Receivers that join a weight-update group by the raw id of its NCCL communicator."""

from __future__ import annotations

import base64
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl

from fsdpbench.engine.device import Device
from fsdpbench.engine.weight_sync.groups import WeightGroup
from fsdpbench.errors import WeightSyncError


def mint_id(rank: int, world_size: int) -> dict[str, Any]:
    """Mint an id for a receiver that never comes."""
    group = WeightGroup.listen("weights", 2, Device("cuda", 0), 3.0, greets=False)
    group.mint_id()
    unique_id = base64.b64decode(group.address_for(1).unique_id)
    said = ""
    try:
        group.join()
    except WeightSyncError as error:
        said = str(error)
    group.abort()
    return {
        "id_bytes": len(unique_id),
        "is_set": any(unique_id),
        "said": said,
        "healthy": float(torch.ones(4, device="cuda").sum()) == 4.0,
    }


def join_by_id(rank: int, world_size: int) -> dict[str, Any]:
    """Send three messages to rank 1, which knows the id alone, as a vLLM worker does."""
    told: list[Any] = [None]
    device = Device("cuda", rank)
    if rank == 0:
        group = WeightGroup.listen("weights", 2, device, 30.0, greets=False)
        group.mint_id()
        told = [group.address_for(1).unique_id]
    dist.broadcast_object_list(told, src=0, device=torch.device("cpu"))
    sent = [torch.arange(1000, device="cuda").to(torch.bfloat16) * step for step in (1, 2, 3)]
    if rank == 0:
        group.join()
        for message in sent:
            group.broadcast(message).wait()
        group.close()
        return {"sent": [message.float().sum().item() for message in sent]}
    communicator = nccl.init_rank(2, base64.b64decode(told[0]), 1)
    summed = torch.zeros(1, device="cuda")
    nccl.all_reduce([summed], comms=[communicator])
    arrived = [torch.empty_like(message) for message in sent]
    for message in arrived:
        nccl.broadcast([message], root=0, comms=[communicator])
    torch.cuda.synchronize()
    return {
        "summed": summed.item(),
        "arrived": [message.float().sum().item() for message in arrived],
    }
