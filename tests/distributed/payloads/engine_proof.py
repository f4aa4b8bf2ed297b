"""Payload of the proof of correctness: real training steps of the engine on one rank of a mesh."""

from __future__ import annotations

from typing import Any

import torch

from fsdpbench.engine.algorithms.sft import FSDPLMEngine
from fsdpbench.engine.config.train import FinetuneSpec, TrainEngineConfig
from fsdpbench.engine.models.export import iterate_full_parameters
from fsdpbench.errors import FsdpbenchError

LENGTHS = (13, 5, 29, 17, 8, 2, 23, 11, 19, 7, 31, 1)  # rows of the global batch
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=60, train_batch_size=12)


def make_batch(step: int, rows: slice = slice(None), vocab_size: int = 512) -> dict[str, Any]:
    """Return padded rows of the seeded global batch of one step; some tokens are masked."""
    generator = torch.Generator().manual_seed(1000 + step)
    width = max(LENGTHS)
    ids = torch.randint(0, vocab_size, (len(LENGTHS), width), generator=generator)
    lengths = torch.tensor(LENGTHS)
    mask = torch.arange(width)[None] < lengths[:, None]
    loss_mask = mask & (torch.rand(ids.shape, generator=generator) < 0.8)
    loss_mask[:, 0] = False
    return {
        "input_ids": (ids * mask)[rows],
        "attention_mask": mask[rows],
        "loss_mask": loss_mask[rows],
    }


def train(rank: int, world_size: int, config: dict[str, Any], num_steps: int = 5) -> dict[str, Any]:
    """Train on this rank's share; return losses, norms and (rank 0) the full final weights."""
    engine = FSDPLMEngine(TrainEngineConfig(**config))
    engine.create_process_group()
    engine.initialize(ft_spec=SPEC)
    losses, norms = [], []
    for step in range(num_steps):
        rows = slice(engine.data_parallel_rank, None, engine.data_parallel_world_size)
        stats = engine.train_lm(make_batch(step, rows))
        engine.lr_scheduler_step()
        losses.append(stats["loss"])
        norms.append(stats["grad_norm"])
        assert stats["update_successful"] == 1.0
        assert stats["num_micro_batches"] == 3.0
    weights = full_weights(engine)
    engine.destroy()
    engine.destroy()
    return {"losses": losses, "norms": norms, "weights": weights}


def full_weights(engine: FSDPLMEngine) -> dict[str, Any]:
    """Return the whole weights on rank 0, nothing elsewhere."""
    parts = engine.parts
    named = iterate_full_parameters(parts.model, parts.meshes, parts.device)
    return {name: value.clone().float().numpy() for name, value in named if value is not None}


def train_two_engines(rank: int, world_size: int, first: dict, second: dict) -> list[dict]:
    """Interleave steps of two engines with different meshes in one process."""
    engines = []
    for config in (first, second):
        engine = FSDPLMEngine(TrainEngineConfig(**config))
        engine.create_process_group()
        engine.initialize(ft_spec=SPEC)
        engines.append(engine)
    figures: list[dict] = [{"losses": [], "norms": []} for _ in engines]
    for step in range(2):
        for engine, figure in zip(engines, figures, strict=True):
            rows = slice(engine.data_parallel_rank, None, engine.data_parallel_world_size)
            stats = engine.train_lm(make_batch(step, rows))
            figure["losses"].append(stats["loss"])
            figure["norms"].append(stats["grad_norm"])
    for engine in engines:
        engine.destroy()
    return figures


def expect_error(rank: int, world_size: int, config: dict[str, Any]) -> str:
    """Return the message that building this engine is refused with."""
    engine = FSDPLMEngine(TrainEngineConfig(**config))
    try:
        engine.create_process_group()
        engine.initialize(ft_spec=SPEC)
    except FsdpbenchError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""
