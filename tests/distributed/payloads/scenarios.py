"""Engines of the example scenarios, side by side in one process, one step of SFT each."""

from __future__ import annotations

from typing import Any

from fsdpbench.engine.algorithms.sft import FSDPLMEngine
from fsdpbench.engine.config.train import TrainEngineConfig
from tests.distributed.payloads.engine_checks import own_rows
from tests.distributed.payloads.engine_proof import SPEC, make_batch


def train_one_step(rank: int, world_size: int, configs: list[dict[str, Any]]) -> list[dict]:
    engines = []
    for config in configs:
        engine = FSDPLMEngine(TrainEngineConfig(**config))
        engine.initialize(ft_spec=SPEC)
        engines.append(engine)
    stats = [engine.train_lm(make_batch(0, own_rows(engine))) for engine in engines]
    for engine in engines:
        engine.destroy()
    return stats
