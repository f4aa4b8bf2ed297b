"""Tensors of the simulated device have shapes and no values; those of the host are real.

The host steers a step by numbers it can read: lengths, counts, agreements between ranks. Those stay
real CPU tensors. Whatever touches the device, or comes from something without values, is fake, so
that offloaded weights take no host memory either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fsdpbench.bench.predict.simulated_device import DEVICE_TYPE
from fsdpbench.errors import FsdpbenchError

WRAPPERS = (DTensor, AsyncCollectiveTensor)
READ_FIGURE = 1.0  # what a step's figures (loss, norm) read as


class DeviceFakeMode(FakeTensorMode):
    """Runs an operator on shapes alone if it concerns the device, and for real otherwise."""

    avoid_device_init = True  # there is no kernel that could make a tensor of a list on the device

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, WRAPPERS) for kind in types):
            return NotImplemented  # the tensors inside come by one by one
        kwargs = kwargs or {}
        if not concerns_device(args, kwargs):
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return read_figure(args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def concerns_device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether an operator reads or makes a tensor that has no values."""
    leaves = [*tree_leaves(args), *tree_leaves(kwargs)]
    target = kwargs.get("device")
    if isinstance(target, torch.device) and target.type == DEVICE_TYPE:
        return True
    leaves_meta = target is not None and torch.device(target).type != "meta"
    return any(
        isinstance(leaf, FakeTensor)
        or (isinstance(leaf, torch.Tensor) and leaf.is_meta and leaves_meta)
        or (isinstance(leaf, torch.device) and leaf.type == DEVICE_TYPE)
        for leaf in leaves
    )


def read_figure(tensor: FakeTensor) -> float:
    """Answer the host's reading of a device tensor: figures only, which steer nothing."""
    if not tensor.is_floating_point():
        raise FsdpbenchError(
            f"simulation: the host reads a {tensor.dtype} off the device, where no values exist. "
            "What the step does next may depend on it, so it cannot be predicted."
        )
    return READ_FIGURE
