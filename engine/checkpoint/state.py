"""The training state as torch's distributed checkpoints see it.

`state_dict` hands out the live tensors, so a load reads straight into parameters and optimizer
states and needs no second copy of them. Everything that is no tensor (schedule, hyper-parameters,
version) is one JSON text, which loads whatever torch or Python it was written by.
Random states are one entry a rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from fsdpbench.engine.parallel.off_device import OffDevice
from fsdpbench.engine.parallel.regions import local_shard
from fsdpbench.engine.parallel.tensor import find_tied_parameters

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from fsdpbench.engine.device import Device
    from fsdpbench.engine.optim.sharded import ShardedOptimizer

MODEL, OPTIMIZER, RNG, PROGRESS = "model", "optimizer", "rng", "progress"


class DCPState(Stateful):
    """Model, optimizer, schedule, version and random state of one rank.

    What is None is left out. After `load_state_dict`, `version` is the loaded one. Works for shards
    and states on the device and in host memory alike. No communication.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: ShardedOptimizer | None = None,
        scheduler: LRScheduler | None = None,
        *,
        version: int = 0,
        device: Device | None = None,
        rank: int = 0,
        with_model: bool = True,
        with_rng: bool = True,
    ) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.version, self.device, self.rank = version, device, rank
        self.with_model, self.with_rng = with_model, with_rng

    def state_dict(self) -> dict[str, Any]:
        """Collect the live tensors and a text; optimizer states are made if there are none yet.

        Waits for the device, since a streamed optimizer may be copying states to host memory.
        """
        if self.device is not None:
            self.device.synchronize()
        state: dict[str, Any] = {PROGRESS: self._describe_progress()}
        if self.with_model:
            state[MODEL] = self.model_tensors()
        if self.optimizer is not None:
            states = self.optimizer_tensors()
            if states:  # SGD has none
                state[OPTIMIZER] = states
        if self.with_rng:
            state[RNG] = {f"rank{self.rank}": read_random_states(self.device)}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave out and a reader filled; other tensors are copied."""
        if self.with_model:
            copy_into(self.model_tensors(), state_dict[MODEL])
        if self.optimizer is not None:
            live = self.optimizer_tensors()
            for name, states in state_dict.get(OPTIMIZER, {}).items():
                copy_into(live[name], states)
        if self.with_rng:
            write_random_states(self.device, state_dict[RNG][f"rank{self.rank}"])
        self._restore_progress(state_dict[PROGRESS])

    def model_tensors(self) -> dict[str, torch.Tensor]:
        """Map names to live parameters and persistent buffers; tied ones once."""
        tensors: dict[str, Any] = get_model_state_dict(self.model, options=StateDictOptions())
        repeated = {name for _, *others in find_tied_parameters(self.model) for name in others}
        return {name: value for name, value in tensors.items() if name not in repeated}

    def optimizer_tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Map parameters' names to their live optimizer states.

        Parameters that had no step yet get the states that their first step would make, which
        changes nothing. Torch's own function would take an empty step instead and count it.
        """
        optimizer = self.optimizer
        assert optimizer is not None  # the callers ask first
        optimizer.make_states()
        if not optimizer.state:
            return {}
        states = get_optimizer_state_dict(self.model, optimizer, options=StateDictOptions())
        tensors: dict[str, dict[str, torch.Tensor]] = states["state"]  # type: ignore[assignment]
        return {name: dict(values) for name, values in tensors.items()}

    def _describe_progress(self) -> str:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        schedule = None if self.scheduler is None else self.scheduler.state_dict()
        content = {"version": self.version, "groups": settings, "schedule": schedule}
        return json.dumps(content, default=float)  # a number on the device

    def _restore_progress(self, text: str) -> None:
        content = json.loads(text)
        self.version = content["version"]
        if self.optimizer is not None:
            for group, saved in zip(self.optimizer.param_groups, content["groups"], strict=True):
                known = {name: value for name, value in saved.items() if name in group}
                group.update({k: restore_type(v, group[k]) for k, v in known.items()})
        if self.scheduler is not None and content["schedule"] is not None:
            self.scheduler.load_state_dict(content["schedule"])


def restore_type(value: Any, like: Any) -> Any:
    """Undo what JSON does to tuples; a number on the device goes back there."""
    if isinstance(like, tuple):
        return tuple(value)
    if isinstance(like, torch.Tensor):
        return torch.full_like(like, value)
    return value


@torch.no_grad()
def copy_into(live: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors that are not the live ones themselves."""
    for name, target in live.items():
        source = given[name]
        if not shares_storage(target, source):
            target.copy_(source)


def shares_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Tell whether two tensors show the same memory of this rank."""
    own, other = local_shard(first), local_shard(second)
    return own.device == other.device and own.data_ptr() == other.data_ptr()


def read_random_states(device: Device | None) -> dict[str, torch.Tensor]:
    """Return the states of torch's generators of the host and of the device."""
    states = {"host": torch.get_rng_state()}
    if device is not None and device.is_asynchronous:
        states["device"] = device.module.get_rng_state(device.torch_device)
    return states


def write_random_states(device: Device | None, states: Mapping[str, torch.Tensor]) -> None:
    """Set the generators to states that were read before."""
    torch.set_rng_state(states["host"])
    if device is not None and device.is_asynchronous and "device" in states:
        device.module.set_rng_state(states["device"], device.torch_device)


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    """Map names to whole shapes."""
    return {name: tensor.shape for name, tensor in tensors.items()}


@torch.no_grad()
def stage_on_host(value: Any) -> Any:
    """Copy a state dict's tensors to host memory, so that training may change the originals."""
    with OffDevice() as pieces:
        staged = _stage(value, pieces)
        pieces.finish()
    return staged


def _stage(value: Any, pieces: OffDevice) -> Any:
    if isinstance(value, dict):
        return {name: _stage(inner, pieces) for name, inner in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    copy = torch.empty_like(value.detach(), device="cpu")  # of a DTensor, one of the same placement
    source, target = local_shard(value), local_shard(copy)
    if source.is_contiguous():
        flat = target.view(-1).view(torch.uint8)
        pieces.submit(source, lambda start: partial(_fill, flat, start))
    else:
        target.copy_(source)
    return copy


def _fill(target: torch.Tensor, start: int, piece: torch.Tensor) -> None:
    target[start : start + piece.numel()].copy_(piece)
