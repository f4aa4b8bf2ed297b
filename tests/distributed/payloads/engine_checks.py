"""Payloads about single behaviours of the engine: skipping, evaluation, uneven data, saving."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fsdpbench.engine.algorithms.sft import FSDPLMEngine
from fsdpbench.engine.config.checkpoint import SaveLoadMeta
from fsdpbench.engine.config.tracing import PerfTracerConfig
from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.ops.sft_loss import sft_loss, sft_loss_weight
from fsdpbench.engine.protocols import LossInputs, LossOutputs
from fsdpbench.errors import ConfigError
from tests.distributed.payloads.engine_proof import LENGTHS, SPEC, full_weights, make_batch


@contextmanager
def running(config: dict[str, Any]) -> Iterator[FSDPLMEngine]:
    engine = FSDPLMEngine(TrainEngineConfig(**config))
    engine.create_process_group()
    engine.initialize(ft_spec=SPEC)
    try:
        yield engine
    finally:
        engine.destroy()


def own_rows(engine: FSDPLMEngine) -> slice:
    return slice(engine.data_parallel_rank, None, engine.data_parallel_world_size)


def skip_non_finite(rank: int, world_size: int, config: dict[str, Any]) -> dict[str, Any]:
    """Step, step with an infinite loss on one rank, step again."""

    def poisoned(inputs: LossInputs) -> LossOutputs:
        outputs = sft_loss(inputs)
        factor = float("inf") if rank == world_size - 1 else 1.0
        return LossOutputs(outputs.loss * factor, outputs.stats)

    with running(config) as engine:
        rows = own_rows(engine)
        engine.train_lm(make_batch(0, rows))
        before = full_weights(engine)
        bad = engine.train_batch(make_batch(1, rows), poisoned, sft_loss_weight)
        after = full_weights(engine)
        good = engine.train_lm(make_batch(2, rows))
        return {"bad": bad, "good": good, "before": before, "after": after}


def train_without_poison(rank: int, world_size: int, config: dict[str, Any]) -> dict[str, Any]:
    """The same run without the poisoned step."""
    with running(config) as engine:
        rows = own_rows(engine)
        engine.train_lm(make_batch(0, rows))
        return engine.train_lm(make_batch(2, rows))


def evaluate(rank: int, world_size: int, config: dict[str, Any]) -> dict[str, Any]:
    """Compare evaluation, forward values and the loss of the step that follows."""
    with running(config) as engine:
        batch = make_batch(0, own_rows(engine))
        engine.eval()
        values = engine.forward_batch(batch)
        entropy = engine.forward_batch(
            batch, select=lambda inputs: inputs.entropy, with_entropy=True
        )
        return {
            "logprobs": values.cpu().numpy(),
            "entropy": entropy.cpu().numpy(),
            "eval": engine.evaluate_lm(batch),
            "forward_only": engine.forward_backward_batch(
                batch, sft_loss, sft_loss_weight, forward_only=True
            ),
            "train": engine.train_lm(batch),
            "rows": list(range(len(LENGTHS)))[own_rows(engine)],
        }


def train_uneven(rank: int, world_size: int, config: dict[str, Any], cut: int) -> dict[str, Any]:
    """Give the first data-parallel rank `cut` rows and the second one the rest."""
    with running(config) as engine:
        rows = slice(0, cut) if engine.data_parallel_rank == 0 else slice(cut, None)
        stats = engine.train_lm(make_batch(0, rows))
        return {"stats": stats, "weights": full_weights(engine)}


def accumulate_by_hand(rank: int, world_size: int, config: dict[str, Any]) -> dict[str, Any]:
    """Use the parts of a step one by one and compare with `train_batch`."""
    with running(config) as engine:
        batch = make_batch(0, own_rows(engine))
        engine.train()
        engine.optimizer_zero_grad()
        first = engine.forward_backward_batch(batch, sft_loss, sft_loss_weight)
        second = engine.optimizer_step()
        engine.lr_scheduler_step()
        by_hand = full_weights(engine)
    with running(config) as engine:
        whole = engine.train_lm(batch)
        return {
            "parts": {**first, **second},
            "whole": whole,
            "same": all((by_hand[k] == v).all() for k, v in full_weights(engine).items()),
        }


def refuse_training(rank: int, world_size: int, config: dict[str, Any]) -> list[str]:
    """Collect what an inference-only engine says to each training call."""
    messages = []
    with running({**config, "optimizer": None}) as engine:
        batch = make_batch(0, own_rows(engine))
        for call in (
            lambda: engine.train_lm(batch),
            engine.optimizer_step,
            engine.lr_scheduler_step,
        ):
            try:
                call()
            except ConfigError as error:
                messages.append(str(error))
        engine.evaluate_lm(batch)
    return messages


def save_and_load(
    rank: int, world_size: int, config: dict[str, Any], folder: str
) -> dict[str, Any]:
    """Train, save, train on, load back: the first values must return."""
    with running(config) as engine:
        batch = make_batch(0, own_rows(engine))
        engine.train_lm(batch)
        engine.save(SaveLoadMeta(path=folder))
        saved = full_weights(engine)
        engine.train_lm(batch)
        changed = full_weights(engine)
        engine.load(SaveLoadMeta(path=folder))
        return {"saved": saved, "changed": changed, "loaded": full_weights(engine)}


def trace(rank: int, world_size: int, config: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train two steps under the tracer; return span counts and the observable numbers."""
    with running(config) as engine:
        engine.config_perf_tracer(PerfTracerConfig(enabled=True, output_dir=folder))
        for step in range(2):
            engine.train_lm(make_batch(step, own_rows(engine)))
        engine.set_version(7)
        phases = {name: len(values) for name, values in engine.tracer.phase_seconds().items()}
        return {
            "phases": phases,
            "file": str(engine.save_perf_tracer()),
            "stats": engine.export_stats(),
            "version": engine.get_version(),
            "head": engine.current_data_parallel_head,
            "is_head": engine.is_data_parallel_head,
            "dp_rank": engine.data_parallel_rank,
            "groups": [
                torch.distributed.get_world_size(group)
                for group in (
                    engine.data_parallel_group,
                    engine.context_and_model_parallel_group,
                    engine.cpu_group,
                )
            ],
            "kernel": engine.attention_kernel_name,
        }


def overfit(rank: int, world_size: int, config: dict[str, Any]) -> tuple[list[float], float]:
    """Train 12 steps on one batch; return the losses and the loss afterwards."""
    with running(config) as engine:
        batch = make_batch(0, own_rows(engine))
        losses = [engine.train_lm(batch)["loss"] for _ in range(12)]
        return losses, engine.evaluate_lm(batch)["loss"]
