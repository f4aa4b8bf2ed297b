"""Parallel styles that torch does not bring: how parameters lie and what inputs become.

Both keep plain local tensors at the module's edge, so model code never meets a mesh.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle


class ReplicateParallel(ParallelStyle):
    """Keep a module's parameters whole on every rank; their gradients are summed over the axis.

    The input is a local tensor that lies as `layout` says (by default a shard of dim 1), and so
    does the output.
    """

    def __init__(self, layout: Placement | None = None) -> None:
        super().__init__()
        self.layout = layout or Shard(1)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = distribute_module(module, device_mesh, self._replicate)
        module.register_forward_pre_hook(lambda _, inputs: self._enter(inputs[0], device_mesh))
        module.register_forward_hook(lambda _, inputs, output: output.to_local())
        return module

    @staticmethod
    def _replicate(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = DTensor.from_local(parameter, mesh, [Replicate()], run_check=False)
            module.register_parameter(name, nn.Parameter(whole, parameter.requires_grad))

    def _enter(self, x: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(x, mesh, [self.layout], run_check=False)


class GatherSequenceInput(ParallelStyle):
    """Give a block the whole sequence: gather its `hidden_states` (first argument or keyword).

    The block's linear layers take the gathered input as one DTensor, so that their partial
    gradients add up before the single reduce-scatter that undoes the gather.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(x: torch.Tensor) -> DTensor:
            shard = DTensor.from_local(x, device_mesh, [Shard(1)], run_check=False)
            return shard.redistribute(placements=[Replicate()])

        def enter(
            _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if args:
                return (gather(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": gather(kwargs["hidden_states"])}

        module.register_forward_pre_hook(enter, with_kwargs=True)
        return module
