"""Payloads for the functions of a step and of joining a process group."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import torch
import torch.distributed as dist

from fsdpbench.engine import step
from fsdpbench.engine.config.parallel import parse_backend
from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.launch import join_process_group
from fsdpbench.engine.models.facts import read_model_facts
from fsdpbench.engine.ops.sft_loss import sft_loss, sft_loss_weight
from fsdpbench.engine.parallel.mesh import build_meshes
from tests.distributed.payloads.engine_checks import running
from tests.distributed.payloads.engine_proof import make_batch


class PlanningParts:
    """The three parts that planning reads."""

    def __init__(self, config: TrainEngineConfig) -> None:
        self.config = config
        self.model = SimpleNamespace(facts=read_model_facts("tiny-llama"))
        self.meshes = build_meshes(parse_backend("fsdp:d2").strategy, "cpu")


def align(rank: int, world_size: int) -> list[float]:
    values = torch.tensor([1.0, 2, 3, 4, 0, 6, 7, 0])
    own = values.chunk(world_size)[rank]
    return step.align_with_tokens(own, dist.group.WORLD).tolist()


def plan(rank: int, world_size: int) -> tuple[int, int]:
    config = TrainEngineConfig(mb_spec={"max_tokens_per_mb": 8})
    rows = 4 if rank == 0 else 1
    batch = {
        "input_ids": torch.ones(rows, 8, dtype=torch.long),
        "attention_mask": torch.ones(rows, 8, dtype=torch.bool),
    }
    planned = step.plan_microbatches_over_ranks(PlanningParts(config), batch)
    return len(planned), sum(microbatch.is_dummy for microbatch in planned)


def join_twice(rank: int, world_size: int) -> tuple[bool, bool]:
    _, made = join_process_group("cpu")
    return made, dist.is_initialized()


def train_in_evaluation_mode(rank: int, world_size: int, config: dict) -> list[str]:
    """Collect the warnings of two steps in evaluation mode and one in training mode."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    step.logger.addHandler(Listener())
    try:
        with running(config) as engine:
            batch = make_batch(0)
            engine.train()
            engine.train_batch(batch, sft_loss, sft_loss_weight)
            assert said == []
            engine.eval()
            for _ in range(2):
                engine.train_batch(batch, sft_loss, sft_loss_weight)
    finally:
        step.logger.handlers.clear()
    return said
