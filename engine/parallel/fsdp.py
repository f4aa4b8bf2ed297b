"""FSDP2 over the flattened dp x cp axis: one unit per decoder layer and one root for the rest.

Masters stay in the dtype in which the model was built; gathered copies and the computation are in
the compute dtype, gradients are reduced in their own and *averaged* over the axis (the step scales
its loss by the axis size). The wrapping runs at size 1 too: it is what brings mixed precision.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
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
) -> None:
    """Wrap the modules that the policy names (`layer_class` by default), then the root, in place.

    After tensor parallelism and checkpointing, before any parameter has storage.
    """
    mixed_precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    offload = build_offload_policy(config.offload_params, fsdp_mesh.device_type)
    policy = config.wrap_policy
    names = (policy.transformer_layer_cls_to_wrap if policy else None) or (layer_class,)
    move_buffers(model, device)
    for module in (*find_modules_to_wrap(model, names), model):
        fully_shard(module, mesh=fsdp_mesh, mp_policy=mixed_precision, offload_policy=offload)


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
