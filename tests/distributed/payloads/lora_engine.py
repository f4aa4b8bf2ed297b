"""A whole engine with adapters: trained on one mesh, saved, and loaded on another."""

from __future__ import annotations

from typing import Any

import torch

from fsdpbench.engine.config.checkpoint import SaveLoadMeta
from tests.distributed.payloads.engine_checks import own_rows, running
from tests.distributed.payloads.engine_proof import make_batch
from tests.distributed.payloads.lora_training import gather_adapters

CONFIG = {
    "path": "tiny-llama",
    "use_lora": True,
    "lora_rank": 4,
    "dtype": "float32",
    "mb_spec": {"max_tokens_per_mb": 64},
    "optimizer": {"lr": 1e-2},
    "logprobs_chunk_size": 64,
}


def resume_on_another_mesh(
    rank: int, world_size: int, folder: str, weight_format: str
) -> dict[str, Any]:
    """Save on d2 after a step, load on t2 with other first values; both take the same next step."""
    meta = SaveLoadMeta(path=folder, weight_format=weight_format, with_optim=weight_format == "dcp")
    with running({**CONFIG, "backend": "fsdp:d2"}) as engine:
        engine.train_lm(make_batch(0, own_rows(engine)))
        engine.set_version(3)
        engine.save(meta)
        saved = gather_adapters(engine.parts.model, engine.meshes)
        wanted = engine.train_lm(make_batch(1, own_rows(engine)))
    with running({**CONFIG, "backend": "fsdp:t2", "seed": 99}) as engine:
        engine.load(meta)
        loaded = gather_adapters(engine.parts.model, engine.meshes)
        version = engine.get_version()
        found = engine.train_lm(make_batch(1, own_rows(engine)))
    return {
        "version": version,
        "same": all(torch.equal(loaded[name], saved[name]) for name in saved),
        "wanted": (wanted["loss"], wanted["grad_norm"]),
        "found": (found["loss"], found["grad_norm"]),
    }
