"""Every place where a simulation changes torch, with the reason. Undone at its end.

The boundary: no other file of the project replaces anything of torch. Each patch is a context
manager; what it touches is private to torch or documented as not for tensors without values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from unittest.mock import patch as replace_attribute

import torch
import torch.distributed._functional_collectives as functional_collectives
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from fsdpbench.bench.predict.simulated_device import DEVICE_TYPE


class StorageWatcher(Protocol):
    """What the patches tell of memory."""

    def note_resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """A storage has another size now."""
        ...

    def pause(self) -> AbstractContextManager[None]:
        """Take no notice of tensors in the `with` body."""
        ...


@dataclass(frozen=True)
class Patch:
    """One replacement: what, why, and how it is put in place."""

    target: str
    reason: str
    apply: Callable[[StorageWatcher], AbstractContextManager[Any]]


@contextmanager
def apply_patches(watcher: StorageWatcher) -> Iterator[None]:
    """Put all patches in place for the `with` body."""
    with ExitStack() as stack:
        for patch in PATCHES:
            stack.enter_context(patch.apply(watcher))
        yield


def _watch_resizes(watcher: StorageWatcher) -> AbstractContextManager[Any]:
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        result = resize(storage, num_bytes)
        watcher.note_resize(storage, int(num_bytes))
        return result

    return replace_attribute.object(torch.UntypedStorage, "resize_", resize_)


def _hide_propagation(watcher: StorageWatcher) -> AbstractContextManager[Any]:
    name = "_propagate_tensor_meta_non_cached"
    propagate = getattr(ShardingPropagator, name)

    def quietly(*args: Any, **kwargs: Any) -> Any:
        with watcher.pause():
            return propagate(*args, **kwargs)

    return replace_attribute.object(ShardingPropagator, name, quietly)


@contextmanager
def _run_eagerly(_watcher: StorageWatcher) -> Iterator[None]:
    original = functional_collectives._are_we_tracing
    holders = [m for m in list(sys.modules.values()) if vars(m).get(TRACING) is original]
    with ExitStack() as stack:
        for module in holders:
            stack.enter_context(replace_attribute.object(module, TRACING, lambda: False))
        yield


def _seed_on_host(_watcher: StorageWatcher) -> AbstractContextManager[Any]:
    generator = torch.Generator

    def build(device: Any = "cpu") -> torch.Generator:
        on_device = torch.device(device).type == DEVICE_TYPE
        return generator("cpu" if on_device else device)

    return replace_attribute.object(torch, "Generator", build)


@contextmanager
def _pin_nothing(_watcher: StorageWatcher) -> Iterator[None]:
    with (
        replace_attribute.object(torch.Tensor, "is_pinned", lambda *_, **__: False),
        replace_attribute.object(torch.Tensor, "pin_memory", lambda tensor, *_, **__: tensor),
    ):
        yield


def _map_without_pages(_watcher: StorageWatcher) -> AbstractContextManager[Any]:
    def from_buffer(buffer: Any, *, dtype: torch.dtype, **_: Any) -> torch.Tensor:
        # what comes from a tensor without values has none either, hence takes no memory
        shape = torch.empty(len(buffer) // dtype.itemsize, dtype=dtype, device="meta")
        return torch.empty_like(shape, device="cpu")

    return replace_attribute.object(torch, "frombuffer", from_buffer)


TRACING = "_are_we_tracing"
PATCHES = (
    Patch(
        "torch.UntypedStorage.resize_",
        "FSDP2 frees and allocates gathered parameters by it, past the dispatcher",
        _watch_resizes,
    ),
    Patch(
        "ShardingPropagator._propagate_tensor_meta_non_cached",
        "DTensor runs each operator once more on global shapes, which are not memory",
        _hide_propagation,
    ),
    Patch(
        "torch.distributed._functional_collectives._are_we_tracing",
        "a fake mode passes for tracing: DTensor would keep no caches and take other paths",
        _run_eagerly,
    ),
    Patch("torch.Generator", "the simulated device has no generator of its own", _seed_on_host),
    Patch("torch.Tensor.pin_memory", "host memory is not page-locked here", _pin_nothing),
    Patch("torch.frombuffer", "states of a large model would take real memory", _map_without_pages),
)
