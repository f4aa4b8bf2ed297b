"""Tensor parallelism on meta models, and the styles of our own on tiny modules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoConfig

from fsdpbench.engine.models.families import FAMILIES
from fsdpbench.engine.models.meta import build_meta_backbone
from fsdpbench.engine.models.presets import PRESETS
from fsdpbench.engine.parallel.styles import GatherSequenceInput, ReplicateParallel
from fsdpbench.engine.parallel.tensor import apply_tensor_parallel
from fsdpbench.errors import ConfigError

SHOWN = (
    "model.embed_tokens",
    "model.norm",
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.self_attn.o_proj",
    "model.layers.0.self_attn.q_norm",
    "model.layers.0.mlp.down_proj",
)


def build_meta_qwen3() -> nn.Module:
    config = AutoConfig.for_model(**{**PRESETS["tiny-qwen3"], "num_hidden_layers": 1})
    return build_meta_backbone(config, torch.float32)[0]


def describe_tied_model(rank: int, world_size: int) -> dict[str, Any]:
    backbone = build_meta_qwen3()
    apply_tensor_parallel(backbone, init_device_mesh("cpu", (world_size,)), FAMILIES["qwen3"])
    placements = {}
    for path in SHOWN:
        (placement,) = backbone.get_submodule(path).weight.placements
        placements[f"{path}.weight"] = "R" if placement.is_replicate() else f"S({placement.dim})"
    return {
        "tied": backbone.lm_head.weight is backbone.model.embed_tokens.weight,
        "placements": placements,
    }


def apply_plan_with_a_hole(rank: int, world_size: int) -> str:
    family = replace(FAMILIES["qwen3"], query_key_norms=("self_attn.k_norm",))
    try:
        apply_tensor_parallel(build_meta_qwen3(), init_device_mesh("cpu", (world_size,)), family)
    except ConfigError as error:
        return str(error)
    return ""


class Scale(nn.Module):
    """Multiplies the last dim by a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Block(nn.Module):
    """Two column-parallel layers that read one gathered input, and a row-parallel one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False)
        self.down = nn.Linear(4, 3, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down(self.a(hidden_states) * self.b(hidden_states))


def replicate_and_sum_gradients(rank: int, world_size: int) -> tuple[float, float]:
    """The weight's gradient is the sum over all ranks' shards of the input."""
    mesh = init_device_mesh("cpu", (world_size,))
    x = torch.arange(12.0 * world_size).view(1, 4 * world_size, 3)
    reference = Scale()
    reference(x).square().sum().backward()
    module = parallelize_module(Scale(), mesh, ReplicateParallel())
    own = x.chunk(world_size, dim=1)[rank]
    output = module(own)
    output.square().sum().backward()
    gradient = module.weight.grad.full_tensor()
    return (
        float((output - reference(own)).abs().max()),
        float((gradient - reference.weight.grad).abs().max()),
    )


def gather_block_input(rank: int, world_size: int, by_keyword: bool) -> tuple[float, float]:
    """Output and input gradient of a sequence shard equal those of the whole sequence."""
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(1)
    block = Block()
    x = torch.randn(1, 2 * world_size, 3)
    whole = x.clone().requires_grad_()
    wanted = block(whole)
    wanted.square().sum().backward()
    block.zero_grad()
    plan = {
        "": GatherSequenceInput(),
        "a": ColwiseParallel(),
        "b": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    gather = plan.pop("")
    parallelize_module(block, mesh, plan)
    parallelize_module(block, mesh, gather)
    own = x.chunk(world_size, dim=1)[rank].clone().requires_grad_()
    output = block(hidden_states=own) if by_keyword else block(own)
    output.square().sum().backward()
    return (
        float((output - wanted.chunk(world_size, dim=1)[rank]).abs().max()),
        float((own.grad - whole.grad.chunk(world_size, dim=1)[rank]).abs().max()),
    )
