"""FSDP2 over the flattened dp x cp axis: one unit per decoder layer and one root for the rest.

Masters stay in the dtype in which the model was built; gathered copies and the computation are in
the compute dtype, gradients are reduced in their own and *averaged* over the axis (the step scales
its loss by the axis size). The wrapping runs at size 1 too: it is what brings mixed precision.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from fsdpbench.engine.config.fsdp import FSDPEngineConfig
from fsdpbench.errors import ConfigError, Violation


def apply_fsdp2(
    model: nn.Module,
    fsdp_mesh: DeviceMesh,
    config: FSDPEngineConfig,
    *,
    device: torch.device,
    layer_class: str,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    root_parameters: Collection[nn.Parameter] = (),
) -> list[FSDPModule]:
    """Wrap the modules that the policy names (`layer_class` by default), then the root, in place.

    After tensor parallelism and checkpointing, before any parameter has storage. Returns the units,
    the root last. `root_parameters` are read outside their modules' forward, so only the root may
    hold them. Raises ConfigError for a class that the model lacks and for units that would share or
    miss a parameter.
    """
    mixed_precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    offload = build_offload_policy(config.offload_params, fsdp_mesh.device_type)
    policy = config.wrap_policy
    names = (policy.transformer_layer_cls_to_wrap if policy else None) or (layer_class,)
    modules = find_modules_to_wrap(model, names)
    check_units(model, modules, root_parameters)
    move_buffers(model, device)
    for module in modules:
        fully_shard(
            module,
            mesh=fsdp_mesh,
            mp_policy=mixed_precision,
            offload_policy=offload,
            reshard_after_forward=config.reshard_after_forward,
        )
    # what the root gathers is needed again at once, at the beginning of the backward pass
    fully_shard(model, mesh=fsdp_mesh, mp_policy=mixed_precision, offload_policy=offload)
    units = [cast("FSDPModule", module) for module in (*modules, model)]
    apply_prefetch(units, config.forward_prefetch_layers, config.backward_prefetch_layers)
    return units


def apply_prefetch(units: Sequence[FSDPModule], forward: int, backward: int) -> None:
    """Let each unit gather that many units ahead of itself, issued early from the host.

    `units` end with the root; the others come in the reverse of the order in which they run. 0
    leaves FSDP2's own way.
    """
    *layers, root = units
    order = [root, *reversed(layers)]
    for index, unit in enumerate(order):
        if forward:
            unit.set_modules_to_forward_prefetch(order[index + 1 : index + 1 + forward])
        if backward:
            # the root's own backward comes first, then the layers from the last one down
            before = layers if unit is root else order[1:index][::-1]
            unit.set_modules_to_backward_prefetch(list(before[:backward]))


def check_units(
    model: nn.Module, modules: Sequence[nn.Module], root_parameters: Collection[nn.Parameter]
) -> None:
    """Refuse units that cut a tied parameter in two or take one that the root must hold."""
    held_by: dict[nn.Parameter, nn.Module] = {}
    problems: list[str] = []
    for name, module in model.named_modules():
        path = [module, *(model.get_submodule(parent) for parent in parents_of(name))]
        unit = next((step for step in path if any(step is one for one in modules)), model)
        for leaf, parameter in module.named_parameters(recurse=False):
            read_by_root = any(parameter is one for one in root_parameters)
            if unit is not model and read_by_root:
                problems.append(f"the root itself reads {name}.{leaf}, so no unit may hold it")
            elif held_by.setdefault(parameter, unit) is not unit:
                problems.append(f"{name}.{leaf} is tied to a parameter of another unit")
    if problems:
        where = "fsdp.wrap_policy.transformer_layer_cls_to_wrap"
        found = ", ".join(sorted({type(module).__name__ for module in modules}))
        remedy = "wrap decoder layers, or parts of them"
        raise ConfigError([Violation(where, found, text, remedy) for text in problems])


def parents_of(name: str) -> list[str]:
    """List the modules above a dotted name, the nearest first, without the root."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]


def move_buffers(model: nn.Module, device: torch.device | str) -> None:
    """Put buffers on the device. FSDP2 would swap their storage, which not every device allows."""
    for name, values in list(model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, values.to(device))


def build_offload_policy(offload_params: bool, device_type: str) -> OffloadPolicy:
    """Return where shards rest: on the device, or in (on CUDA: pinned) host memory."""
    if not offload_params:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device_type == "cuda")


def find_modules_to_wrap(model: nn.Module, class_names: Collection[str]) -> list[nn.Module]:
    """List the modules of these classes, inner before outer; refuse a class without any."""
    modules = [m for m in model.modules() if type(m).__name__ in class_names]
    found = {type(module).__name__ for module in modules}
    missing = [name for name in class_names if name not in found]
    if missing:
        present = sorted({type(module).__name__ for module in model.modules()})
        raise ConfigError(
            [
                Violation(
                    "fsdp.wrap_policy.transformer_layer_cls_to_wrap",
                    repr(name),
                    "no module of this class is in the model",
                    f"classes of the model: {', '.join(present)}",
                )
                for name in missing
            ]
        )
    return modules[::-1]
