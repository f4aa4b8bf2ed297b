"""Training with engine-level offloads in between, against training without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fsdpbench.engine.config.optimizer import OptimizerConfig
from fsdpbench.engine.device import Device
from fsdpbench.engine.offload import EngineMemory
from fsdpbench.engine.optim.build import build_optimizer
from fsdpbench.engine.optim.clip import gradient_norm, plan_clipping
from fsdpbench.engine.optim.stream_plan import find_blocks
from fsdpbench.errors import PeerError
from tests.distributed.payloads.optim_sharded import (
    MAX_NORM,
    backward,
    batches,
    build_net,
    raw_bits,
    shard_net,
    slice_of,
)

KINDS = ("adam", "adam_bf16", "sgd", "streamed")


class Cramped(EngineMemory):
    """Memory whose rank 0 may lack the room to move."""

    cramped = False

    def _find_room(self) -> None:
        if self.cramped and dist.get_rank() == 0:
            raise OSError("no room")

    def _to_host(self) -> None:
        self._find_room()
        super()._to_host()

    def _to_device(self) -> None:
        self._find_room()
        super()._to_device()


def move_without_room(rank: int, world_size: int) -> dict[str, Any]:
    """Offload and onload where rank 0 fails, then with room, then leave a body by an error."""
    net = torch.nn.Linear(4, 4)
    before = net.weight.detach().clone()
    memory = Cramped(net, None, Device("cpu"), dist.group.WORLD)
    said, states = {}, []

    def attempt(name: str, move: Callable[[], None]) -> None:
        try:
            move()
        except (OSError, PeerError, KeyError) as error:
            said[name] = f"{type(error).__name__}: {error}"
        states.append(memory.is_offloaded)

    def leave_body_by_an_error() -> None:
        with memory.offloaded():
            if rank == 1:
                dist.barrier()
            raise KeyError("alone")

    memory.cramped = True
    attempt("offload", memory.offload)
    memory.cramped = False
    memory.offload()
    memory.cramped = True
    attempt("onload", memory.onload)
    memory.cramped = False
    attempt("onload with room", memory.onload)
    attempt("body", leave_body_by_an_error)
    if rank == 0:
        dist.barrier()
    return {**said, "states": states, "whole": torch.equal(net.weight, before)}


def train_around_offloads(
    rank: int, world_size: int, device: str = "cpu", offload_params: bool = False
) -> dict[str, tuple[bool, ...]]:
    """Per kind: were shards and gradients gone, did parameters stay the same, is the end equal."""
    return {kind: _train(kind, device, offload_params) for kind in KINDS}


def _start(kind: str, device: str, offload_params: bool):
    net = build_net(device)
    data = shard_net(net, "fsdp", device, offload_params)
    config = OptimizerConfig(type="adam" if kind == "streamed" else kind, lr=0.05)
    where = Device(device, torch.cuda.current_device() if device == "cuda" else None)
    optimizer = build_optimizer(
        net.named_parameters(),
        config,
        blocks=find_blocks(net) if kind == "streamed" else None,
        device=where,
    )
    return net, data, optimizer, EngineMemory(net, optimizer, where)


def _train(kind: str, device: str, offload_params: bool) -> tuple[bool, ...]:
    plain = _start(kind, device, offload_params)
    moved = _start(kind, device, offload_params)
    gone, same = [], []
    for batch in batches(3, device):
        for net, data, optimizer, memory in (plain, moved):
            backward(net, slice_of(batch, data))
            if memory is moved[3]:
                params = list(net.parameters())
                with memory.offloaded():
                    shards = [p.to_local() for p in params] + [p.grad.to_local() for p in params]
                    gone.append(all(s.untyped_storage().nbytes() == 0 for s in shards))
                same.append(all(a is b for a, b in zip(params, net.parameters(), strict=True)))
            optimizer.step(clip=plan_clipping(gradient_norm(net.parameters()), MAX_NORM))
            if memory is moved[3]:
                with memory.offloaded():
                    pass
    return all(gone), all(same), raw_bits(plain[2]) == raw_bits(moved[2])
