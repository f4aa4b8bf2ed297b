"""Whole weights out of sharded policies."""

from __future__ import annotations

from typing import Any

import torch

from fsdpbench.engine.models.export import iterate_full_parameters
from tests.distributed.payloads.parallel_policy import DEVICE, build_config, build_policy


def iterate(rank: int, world_size: int, backend: str) -> dict[str, Any]:
    model, meshes = build_policy(build_config("tiny-qwen3", backend))
    tensors = dict(iterate_full_parameters(model, meshes, DEVICE, torch.bfloat16))
    embedding = tensors["model.embed_tokens.weight"]
    shown = None
    if embedding is not None:
        shown = (tuple(embedding.shape), str(embedding.dtype), embedding.device.type)
    return {"names": list(tensors), "embedding": shown}
