"""The order of transforms of a model, on one screen.

The model is on the meta device; nothing is allocated and nothing is communicated. The order
matters: tensor parallelism first, since FSDP shards what it leaves on a rank; checkpointing before
FSDP, so that a layer is gathered once and recomputed inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.parallel.attention import check_attention_dropout, choose_attention_kernel
from fsdpbench.engine.parallel.checkpointing import (
    apply_activation_checkpointing,
    plan_kept_operators,
)
from fsdpbench.engine.parallel.fsdp import apply_fsdp2
from fsdpbench.engine.parallel.mesh import DeviceMeshes
from fsdpbench.engine.parallel.tensor import apply_tensor_parallel
from fsdpbench.log import get_logger

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from fsdpbench.engine.device import Device
    from fsdpbench.engine.models.heads import PolicyModel

logger = get_logger(__name__)


def parallelize_model(
    model: PolicyModel, config: TrainEngineConfig, meshes: DeviceMeshes, device: Device
) -> tuple[FSDPModule, ...]:
    """Spread a meta-device model over the meshes, in place; return its units, the root last."""
    family = model.facts.family
    compute_dtype = getattr(torch, config.dtype)
    kernel = choose_attention_kernel(config.attn_impl, device.type, compute_dtype)
    check_attention_dropout(kernel, model.attention_dropout)

    if meshes.tp is not None:
        apply_tensor_parallel(model.backbone, meshes.tp, family)
    model.attention_kernel = kernel  # under context parallelism it runs between two all-to-alls
    if config.gradient_checkpointing:
        apply_activation_checkpointing(
            model.backbone,
            preserve_rng=model.attention_dropout > 0,
            kept_operators=plan_kept_operators(config.gradient_checkpointing_policy, kernel),
        )
    units = apply_fsdp2(
        model,
        meshes.fsdp,
        config.fsdp,
        device=device.torch_device,
        layer_class=family.decoder_layer_cls,
        compute_dtype=compute_dtype,
        reduce_dtype=getattr(torch, config.grad_reduce_dtype),
        root_parameters=[model.head_weight],
    )
    if meshes.rank == 0:
        logger.info("attention kernel: %s", kernel.name)
    return tuple(units)
