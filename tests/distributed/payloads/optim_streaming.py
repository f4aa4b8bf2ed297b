"""The per-layer step over DTensors: against AdamW, and through distributed checkpoints."""

from __future__ import annotations

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from fsdpbench.engine.config.optimizer import OptimizerConfig
from fsdpbench.engine.device import Device
from fsdpbench.engine.optim.build import build_optimizer
from fsdpbench.engine.optim.clip import gradient_norm, plan_clipping
from fsdpbench.engine.optim.stream_plan import find_blocks
from tests.distributed.payloads.optim_sharded import (
    MAX_NORM,
    backward,
    batches,
    build_net,
    raw_bits,
    shard_net,
    slice_of,
)

CONFIG = OptimizerConfig(lr=0.05, weight_decay=0.1)


def start(layout: str, streamed: bool, device: str = "cpu", offload: bool = False):
    net = build_net(device)
    data = shard_net(net, layout, device, offload)
    blocks = find_blocks(net) if streamed else None
    optimizer = build_optimizer(
        net.named_parameters(), CONFIG, "float32", blocks=blocks, device=Device(device)
    )
    return net, data, optimizer


def train(net, data, optimizer, steps) -> None:
    for batch in steps:
        backward(net, slice_of(batch, data))
        optimizer.step(clip=plan_clipping(gradient_norm(net.parameters()), MAX_NORM))
    net.zero_grad()


@torch.no_grad()
def copy_weights(source, target) -> None:
    """Copy shard by shard: each net has a mesh of its own."""
    for a, b in zip(source.parameters(), target.parameters(), strict=True):
        b.to_local().copy_(a.to_local())


def stream_and_resume(rank: int, world_size: int, layout: str, folder: str) -> dict[str, object]:
    """Train 2 steps beside AdamW, save, resume in fresh optimizers of both kinds, train on."""
    data = batches(4, "cpu")
    plain, streamed = start(layout, False), start(layout, True)
    for triple in (plain, streamed):
        train(*triple, data[:2])
    same_steps = raw_bits(plain[2]) == raw_bits(streamed[2])
    saved = get_optimizer_state_dict(streamed[0], streamed[2])
    moments = [s[name] for s in saved["state"].values() for name in ("exp_avg", "exp_avg_sq")]
    dtensors = all(isinstance(m, DTensor) and m.device.type == "cpu" for m in moments)
    layouts = all(
        state["exp_avg"].placements == param.placements and state["exp_avg"].shape == param.shape
        for param, state in streamed[2].state.items()
    )
    dcp.save(saved, checkpoint_id=folder)
    whole = get_optimizer_state_dict(
        streamed[0], streamed[2], options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )

    fresh = start(layout, True)
    fresh[2].make_states()
    target = get_optimizer_state_dict(fresh[0], fresh[2])
    dcp.load(target, checkpoint_id=folder)
    set_optimizer_state_dict(fresh[0], fresh[2], target)
    adamw = start(layout, False)
    set_optimizer_state_dict(
        adamw[0],
        adamw[2],
        whole,
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    for net, _, _ in (fresh, adamw):
        copy_weights(streamed[0], net)
    same_loaded = raw_bits(fresh[2]) == raw_bits(streamed[2]) == raw_bits(adamw[2])
    for triple in (plain, streamed, fresh, adamw):
        train(*triple, data[2:])
    end = raw_bits(plain[2])
    return {
        "blocks": [len(block) for block in find_blocks(streamed[0])],
        "dtensors_on_the_cpu": dtensors and layouts,
        "same_steps": same_steps and raw_bits(streamed[2]) == end,
        "same_after_resume": same_loaded and raw_bits(fresh[2]) == end,
        "adamw_reads_it": raw_bits(adamw[2]) == end,
    }
