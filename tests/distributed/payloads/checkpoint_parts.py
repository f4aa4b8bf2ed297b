"""Parts of small engines, steps over them and fingerprints of their state."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from fsdpbench.engine.config.parallel import parse_backend
from fsdpbench.engine.config.tracing import PerfTracerConfig
from fsdpbench.engine.config.train import FinetuneSpec
from fsdpbench.engine.device import Device
from fsdpbench.engine.parallel.full_tensors import gather_full_tensor
from fsdpbench.engine.parallel.mesh import build_meshes
from fsdpbench.engine.setup import EngineParts, build_parts
from fsdpbench.engine.tracing.tracer import build_tracer
from tests.distributed.payloads.parallel_policy import DEVICE, build_config

SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=60, train_batch_size=6)


def build(
    backend: str, path: str = "tiny-qwen3", device: Device = DEVICE, **fields: Any
) -> EngineParts:
    optimizer = {"type": "adam", "lr": 1e-2, "warmup_steps_proportion": 0.5}
    config = build_config(path, backend, **{"optimizer": optimizer, **fields})
    meshes = build_meshes(parse_backend(backend).strategy, device.type)
    tracer = build_tracer(PerfTracerConfig(), meshes.rank, device)
    return build_parts(config, SPEC, device, meshes, tracer)


def step(parts: EngineParts, number: int) -> None:
    """One optimizer step by gradients that follow from the step's number, not from a batch."""
    for index, parameter in enumerate(parts.model.parameters()):
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 1.0 + index % 3 - 0.5 * number)
            parameter.grad += 0.1 * parameter.detach()
    parts.optimizer.step()
    parts.optimizer.zero_grad()
    parts.scheduler.step()


def fingerprint(parts: EngineParts) -> dict[str, str]:
    """Hashes of all weights and of all optimizer states, whatever the mesh. Collective."""
    parts.device.synchronize()  # a streamed optimizer copies its states to the host meanwhile
    weights, states = hashlib.sha256(), hashlib.sha256()
    for name, parameter in parts.model.named_parameters():
        update(weights, name, parameter, parts.device)
        for kind, state in sorted(parts.optimizer.state.get(parameter, {}).items()):
            update(states, f"{name}.{kind}", state, parts.device)
    groups = [{k: v for k, v in g.items() if k != "params"} for g in parts.optimizer.param_groups]
    schedule = parts.scheduler.last_epoch, parts.scheduler.get_last_lr()
    return {
        "weights": weights.hexdigest(),
        "states": states.hexdigest(),
        "settings": f"{groups} {schedule}",
    }


def update(digest: Any, name: str, tensor: torch.Tensor, device: Device) -> None:
    whole = gather_full_tensor(tensor, device.torch_device).cpu()
    digest.update(name.encode() + whole.view(-1).view(torch.uint8).numpy().tobytes())
