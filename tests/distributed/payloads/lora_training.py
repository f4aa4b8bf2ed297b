"""Adapters on a mesh against plain peft in one process, with the same first values."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

from fsdpbench.engine.config.optimizer import OptimizerConfig
from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.device import Device
from fsdpbench.engine.models.heads import PolicyModel
from fsdpbench.engine.models.load import resolve_path
from fsdpbench.engine.optim.build import build_optimizer
from fsdpbench.engine.optim.clip import gradient_norm, plan_clipping
from fsdpbench.engine.parallel.adapter_values import fill_adapters
from fsdpbench.engine.parallel.adapters import gather_merged_tensor, iterate_adapter_parameters
from fsdpbench.engine.parallel.full_tensors import gather_full_tensor
from fsdpbench.engine.parallel.mesh import DeviceMeshes
from tests.distributed.payloads.parallel_policy import (
    DEVICE,
    LENGTHS,
    build_config,
    build_policy,
    build_reference,
    make_batch,
    run_policy,
    run_reference,
)

STEPS = 3
OPTIMIZER = OptimizerConfig(type="adam", lr=1e-3, weight_decay=0.01, eps=1e-6)
CLIP = 1.0


def build_adapted(
    path: str, backend: str, **fields: Any
) -> tuple[TrainEngineConfig, PolicyModel, DeviceMeshes]:
    settings = {"use_lora": True, "lora_rank": 4, "lora_alpha": 8, **fields}
    config = build_config(path, backend, **settings)
    model, meshes = build_policy(config)
    fill_adapters(model, config, DEVICE)
    return config, model, meshes


def gather_adapters(model: PolicyModel, meshes: DeviceMeshes) -> dict[str, torch.Tensor]:
    """The whole adapters on rank 0, nothing elsewhere."""
    named = iterate_adapter_parameters(model, meshes, DEVICE)
    return {name: tensor.clone() for name, tensor in named if tensor is not None}


def gather_gradients(model: PolicyModel) -> dict[str, torch.Tensor]:
    cpu = torch.device("cpu")
    named = model.named_adapter_parameters()
    return {n: gather_full_tensor(p.grad, cpu).clone() for n, p in named}


def build_plain(config: TrainEngineConfig, like: PolicyModel, adapters: dict[str, Any]) -> Any:
    """The same model as plain peft has it, on the CPU."""
    settings = like.adapters
    lora = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=list(settings.targets),
        task_type="CAUSAL_LM",
    )
    plain = get_peft_model(build_reference(config, resolve_path(config), like), lora)
    with torch.no_grad():
        for name, parameter in named_plain_adapters(plain):
            parameter.copy_(adapters[name])
    return plain.train()


def named_plain_adapters(plain: Any) -> list[tuple[str, torch.nn.Parameter]]:
    return [
        (name.replace(".default.", "."), parameter)
        for name, parameter in plain.named_parameters()
        if parameter.requires_grad
    ]


def train_plain(plain: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Train all rows at once with torch's own optimizer and clipping."""
    named = dict(named_plain_adapters(plain))
    optimizer = torch.optim.AdamW(
        named.values(), lr=OPTIMIZER.lr, weight_decay=OPTIMIZER.weight_decay, eps=OPTIMIZER.eps
    )
    logprobs, norms, gradients = [], [], []
    for _ in range(STEPS):
        logprobs.append(torch.cat(run_reference(plain, batch)).sum().item())
        gradients.append({name: parameter.grad.clone() for name, parameter in named.items()})
        norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return {
        "logprobs": logprobs,
        "norms": norms,
        "gradients": gradients,
        "adapters": {name: parameter.detach() for name, parameter in named.items()},
        "merged": merge_plain(plain),
    }


def merge_plain(plain: Any) -> dict[str, torch.Tensor]:
    names = get_peft_model_state_dict(plain).keys()
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in names)
    return dict(plain.merge_and_unload().named_parameters())


def train_policy(
    model: PolicyModel, meshes: DeviceMeshes, batch: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Train this rank's rows in two micro-batches a step."""
    optimizer = build_optimizer(model.named_trainable_parameters(), OPTIMIZER, "float32")
    own = list(range(meshes.dp_rank, len(LENGTHS), meshes.dp_size))
    logprobs, norms, gradients = [], [], []
    for _ in range(STEPS):
        found = [run_policy(model, meshes, batch, rows).sum() for rows in (own[:1], own[1:])]
        total = torch.stack(found).sum()
        torch.distributed.all_reduce(total, group=meshes.dp_group)
        logprobs.append(float(total))
        gradients.append(gather_gradients(model))
        norm = gradient_norm(model.parameters())
        norms.append(float(norm))
        optimizer.step(clip=plan_clipping(norm, CLIP))
        optimizer.zero_grad()
    return {
        "logprobs": logprobs,
        "norms": norms,
        "gradients": gradients,
        "adapters": gather_adapters(model, meshes),
        "merged": {
            name: gather_merged_tensor(model, name, DEVICE)
            for name, _ in model.named_hf_parameters()
        },
    }


def compare_with_peft(
    rank: int, world_size: int, path: str, backend: str, **fields: Any
) -> dict[str, float]:
    """Largest differences from plain peft over three steps; only rank 0 has any."""
    config, model, meshes = build_adapted(path, backend, **fields)
    first = gather_adapters(model, meshes)
    batch = make_batch(model.facts.vocab_size)
    cpu = torch.device("cpu")
    base = {n: gather_full_tensor(p, cpu).clone() for n, p in model.named_hf_parameters()}
    found = train_policy(model, meshes, batch)
    for name, parameter in model.named_hf_parameters():
        assert parameter.grad is None, name
        assert torch.equal(gather_full_tensor(parameter, cpu), base[name]), name
    place = "cpu" if config.fsdp.offload_params else DEVICE.type
    assert {parameter.device.type for parameter in model.parameters()} == {place}
    meshes.destroy()
    if rank:
        return {}
    wanted = train_plain(build_plain(config, model, first), batch)
    return {
        "logprobs": relative_error(found["logprobs"], wanted["logprobs"]),
        "norms": relative_error(found["norms"], wanted["norms"]),
        "gradients": max(map(largest_error, found["gradients"], wanted["gradients"])),
        "adapters": largest_difference(found["adapters"], wanted["adapters"]),
        "moved": largest_difference(found["adapters"], first),
        "merged": largest_difference(found["merged"], wanted["merged"]),
    }


def relative_error(found: list[float], wanted: list[float]) -> float:
    return max(abs(one - other) / abs(other) for one, other in zip(found, wanted, strict=True))


def largest_error(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Largest error of a gradient's element, relative to the largest element of all."""
    assert found.keys() == wanted.keys()
    scale = max(float(tensor.abs().max()) for tensor in wanted.values())
    return max(float((found[n] - wanted[n]).abs().max()) for n in wanted) / scale


def largest_difference(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


def compare_checkpointing(rank: int, world_size: int, backend: str) -> float:
    """Difference that recomputing the layers makes to the adapters' gradients."""
    gradients = []
    for recomputed in (False, True):
        _, model, meshes = build_adapted("tiny-llama", backend, gradient_checkpointing=recomputed)
        run_policy(model, meshes, make_batch(model.facts.vocab_size), [0, 2])
        gradients.append(gather_gradients(model))
        meshes.destroy()
    return largest_difference(*gradients)


def describe_precisions(rank: int, world_size: int, backend: str) -> dict[str, Any]:
    """Dtypes at rest and of gradients under bf16 compute, and that a step changes the output."""
    _, model, meshes = build_adapted("tiny-qwen3", backend, dtype="bfloat16")
    batch = make_batch(model.facts.vocab_size)
    before = run_policy(model, meshes, batch, [0, 2])
    optimizer = build_optimizer(model.named_trainable_parameters(), OPTIMIZER, "float32")
    dtypes = {
        "base": {str(p.dtype) for _, p in model.named_hf_parameters()},
        "adapters": {str(p.dtype) for _, p in model.named_adapter_parameters()},
        "gradients": {str(p.grad.dtype) for _, p in model.named_adapter_parameters()},
    }
    optimizer.step()
    optimizer.zero_grad()
    after = run_policy(model, meshes, batch, [0, 2])
    meshes.destroy()
    return {**dtypes, "changed": not torch.equal(before, after)}


def check_on_gpus(rank: int, world_size: int, backend: str) -> dict[str, Any]:
    """Losses of three steps of a bf16 model on GPUs, and the places of what rests."""
    device = Device("cuda", rank)
    config = build_config(
        "tiny-llama", backend, dtype="bfloat16", use_lora=True, lora_rank=4, lora_alpha=8
    )
    model, meshes = build_policy(config, device)
    fill_adapters(model, config, device)
    optimizer = build_optimizer(
        model.named_trainable_parameters(), OptimizerConfig(lr=1e-2), "float32"
    )
    batch = make_batch(model.facts.vocab_size)
    logprobs = []
    for _ in range(STEPS):
        logprobs.append(float(run_policy(model, meshes, batch, [0, 2, 4]).sum()))
        norm = gradient_norm(model.parameters())
        optimizer.step(clip=plan_clipping(norm, CLIP))
        optimizer.zero_grad()
    name = "model.layers.0.self_attn.o_proj.weight"
    merged = gather_merged_tensor(model, name, device)
    base = gather_full_tensor(dict(model.named_hf_parameters())[name], device.torch_device)
    meshes.destroy()
    return {
        "logprobs": logprobs,
        "devices": {parameter.device.type for parameter in model.parameters()},
        "merged": str(merged.dtype),
        "changed": float((merged.float() - base.float()).abs().max()),
    }
