"""A policy model on a mesh against a plain padded model of transformers in the same process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from fsdpbench.engine.batching.packing import pack
from fsdpbench.engine.config.parallel import parse_backend
from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.device import Device
from fsdpbench.engine.models.heads import PolicyModel
from fsdpbench.engine.models.load import build_meta_model, load_hf_config, resolve_path
from fsdpbench.engine.parallel.attention import build_attention_context
from fsdpbench.engine.parallel.attention_kernels import AttentionKernel
from fsdpbench.engine.parallel.full_tensors import gather_full_tensor
from fsdpbench.engine.parallel.materialize import materialize_model
from fsdpbench.engine.parallel.mesh import DeviceMeshes, build_meshes
from fsdpbench.engine.parallel.parallelize import parallelize_model
from fsdpbench.engine.parallel.regions import local_shard, plan_region
from fsdpbench.engine.parallel.seeded_weights import SeededWeights
from fsdpbench.engine.parallel.ulysses import gather_row, slice_row

LENGTHS = (13, 1, 30, 8, 21, 2, 17, 5)  # a sequence of one token has no loss at all
DEVICE = Device("cpu")


def build_config(path: str, backend: str, **fields: Any) -> TrainEngineConfig:
    values = {"init_from_scratch": True, "dtype": "float32", "seed": 7, "logprobs_chunk_size": 16}
    return TrainEngineConfig(path=path, backend=backend, **{**values, **fields})


def build_policy(
    config: TrainEngineConfig, device: Device = DEVICE
) -> tuple[PolicyModel, DeviceMeshes]:
    meshes = build_meshes(parse_backend(config.backend).strategy, device.type)
    source = resolve_path(config)
    model = build_meta_model(config, source)
    parallelize_model(model, config, meshes, device)
    materialize_model(model, config, source, meshes, device)
    return model, meshes


def build_reference(
    config: TrainEngineConfig, source: Path, like: PolicyModel, device: Device = DEVICE
) -> Any:
    """A plain model on the CPU with the very weights that `init_from_scratch` draws on `device`."""
    reference = AutoModelForCausalLM.from_config(
        load_hf_config(source), dtype=torch.float32, attn_implementation="sdpa"
    )
    weights = SeededWeights(
        config.seed, like.initializer_range, device.torch_device, like.initial_values
    )
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            shape = parameter.shape
            parameter.copy_(weights.read(name, shape, plan_region(shape, ())))
    return reference.train()


def make_batch(vocab_size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    batch = {
        "input_ids": torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long),
        "attention_mask": torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.bool),
        "weight": torch.zeros(len(LENGTHS), max(LENGTHS)),
    }
    for row, length in enumerate(LENGTHS):
        ids = torch.randint(0, vocab_size, (length,), generator=generator)
        batch["input_ids"][row, :length] = ids
        batch["attention_mask"][row, :length] = True
        batch["weight"][row, :length] = torch.rand(length, generator=generator)
    return batch


def run_policy(
    model: PolicyModel, meshes: DeviceMeshes, batch: dict[str, torch.Tensor], rows: list[int]
) -> torch.Tensor:
    """Forward and backward over some rows; returns the logprobs [T] of the packed row."""
    packed = pack(batch, rows, pad_multiple=meshes.cp_size * meshes.tp_size)
    packed = packed.to(meshes.device_type)
    context = build_attention_context(packed, meshes.cp_group, model.attention_kernel)
    ids, positions, labels = (
        slice_row(packed.tokens[name], meshes.cp_group)
        for name in ("input_ids", "position_ids", "labels")
    )
    logprobs, _ = model(ids[None], positions[None], labels, context)
    aligned = torch.roll(gather_row(logprobs, meshes.cp_group), 1)
    if torch.is_grad_enabled():
        (-(aligned * packed.tokens["weight"]).sum() * meshes.fsdp_size).backward()
    return aligned.detach()[: packed.num_real_tokens].cpu()


def run_reference(reference: Any, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The same over all rows, padded; returns the logprobs [L] of each row."""
    mask = batch["attention_mask"]
    logits = reference(input_ids=batch["input_ids"], attention_mask=mask.long()).logits
    chosen = logits[:, :-1].log_softmax(-1).gather(2, batch["input_ids"][:, 1:, None])[..., 0]
    aligned = torch.cat([torch.zeros(len(mask), 1), chosen], dim=1)
    if torch.is_grad_enabled():
        (-(aligned * batch["weight"] * mask).sum()).backward()
    return [row[:length].detach() for row, length in zip(aligned, LENGTHS, strict=True)]


def compare_gradients(model: PolicyModel, reference: Any, device: Device) -> float:
    """Largest error of a parameter's gradient, relative to its largest element."""
    expected = {name: p.grad for name, p in reference.named_parameters()}
    errors = {}
    for name, parameter in model.named_hf_parameters():
        found = gather_full_tensor(parameter.grad, device.torch_device).cpu()
        wanted = expected.pop(name)
        errors[name] = float((found - wanted).abs().max() / wanted.abs().max())
    assert not expected, f"parameters that the policy lacks: {list(expected)}"
    return max(errors.values())


def count_attention_calls(model: PolicyModel) -> list[int]:
    """Wrap the model's kernel; the returned list grows by one a call."""
    calls: list[int] = []
    kernel = model.attention_kernel

    def run(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        return kernel.run(*arguments)

    model.attention_kernel = AttentionKernel(kernel.name, run)
    return calls


def sum_gradients(model: PolicyModel) -> float:
    return sum(float(local_shard(p.grad).double().sum()) for p in model.parameters())


def check_rest(model: PolicyModel, config: TrainEngineConfig, device: Device) -> None:
    """Shards and gradients rest where they should, and tied names are one parameter."""
    place = "cpu" if config.fsdp.offload_params else device.type
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.device.type == parameter.grad.device.type == place, name
    backbone = model.backbone
    tied = backbone.lm_head.weight is backbone.model.embed_tokens.weight
    assert tied == model.facts.tie_word_embeddings


def compare_with_plain_model(
    rank: int, world_size: int, path: str, backend: str, on_gpus: bool = False, **fields: Any
) -> dict[str, Any]:
    """Errors of logprobs and gradients; micro-batches of uneven size per data-parallel rank."""
    device = Device("cuda", rank) if on_gpus else DEVICE
    config = build_config(path, backend, **fields)
    model, meshes = build_policy(config, device)
    calls = count_attention_calls(model)
    reference = build_reference(config, resolve_path(config), model, device)
    batch = make_batch(model.facts.vocab_size)
    own = list(range(meshes.dp_rank, len(LENGTHS), meshes.dp_size))
    microbatches = [own[:1], own[1:]]
    found = torch.cat([run_policy(model, meshes, batch, rows) for rows in microbatches])
    expected = run_reference(reference, batch)
    wanted = torch.cat([expected[row] for rows in microbatches for row in rows])
    check_rest(model, config, device)
    tensors = [found, *model.parameters(), *(p.grad for p in model.parameters())]
    results = {
        "logprobs": float((found - wanted).abs().max()),
        "gradients": compare_gradients(model, reference, device),
        "attention_calls": len(calls),
        "gradient_sum": sum_gradients(model),
        "dtypes": {str(tensor.dtype) for tensor in tensors},
        "kernel": model.attention_kernel.name,
    }
    meshes.destroy()
    return results


def interleave_two_policies(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """Gradients of a cp2 and a tp2 model, stepped one after the other and then in turns."""
    configs = [build_config("tiny-qwen3", f"fsdp:{mesh}") for mesh in ("c2", "t2")]
    batch = make_batch(512)

    def step(model: PolicyModel, meshes: DeviceMeshes, rows: list[int]) -> None:
        run_policy(model, meshes, batch, rows)

    alone = []
    for config in configs:
        model, meshes = build_policy(config)
        for rows in ([0, 2], [1, 3, 4]):
            step(model, meshes, rows)
        alone.append(sum_gradients(model))
        meshes.destroy()
    built = [build_policy(config) for config in configs]
    for rows in ([0, 2], [1, 3, 4]):
        for model, meshes in built:
            step(model, meshes, rows)
    interleaved = [sum_gradients(model) for model, _ in built]
    for _, meshes in built:
        meshes.destroy()
    return alone, interleaved
