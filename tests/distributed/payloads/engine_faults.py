"""Payloads about faults of one rank, and about what must not leak from one call into the next."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fsdpbench.engine.algorithms.sft import FSDPLMEngine
from fsdpbench.engine.checkpoint import hf
from fsdpbench.engine.config.checkpoint import SaveLoadMeta
from fsdpbench.engine.config.parallel import ParallelStrategy
from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.ops.sft_loss import sft_loss, sft_loss_weight
from fsdpbench.engine.protocols import LossInputs, LossOutputs
from fsdpbench.errors import FsdpbenchError
from tests.distributed.payloads.engine_checks import own_rows, running
from tests.distributed.payloads.engine_proof import SPEC, full_weights, make_batch


def answer(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the kind and the text of the error that a call raises."""
    try:
        call()
    except FsdpbenchError as error:
        return type(error).__name__, str(error)
    return "", ""


def train_around_evaluation(
    rank: int, world_size: int, config: dict[str, Any], evaluate: bool
) -> dict[str, Any]:
    """Two steps, with an evaluation before the second, amid its parts and at the end."""
    with running(config) as engine:
        rows = own_rows(engine)
        engine.train_lm(make_batch(0, rows))
        leftovers = [p for p in engine.parts.model.parameters() if p.grad is not None]
        losses = []
        if evaluate:
            losses.append(engine.evaluate_lm(make_batch(1, rows))["loss"])
            engine.forward_batch(make_batch(1, rows))
        engine.train()
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(make_batch(1, rows), sft_loss, sft_loss_weight)
        if evaluate:
            losses.append(engine.evaluate_lm(make_batch(1, rows))["loss"])
        norm = engine.optimizer_step()["grad_norm"]
        after = engine.evaluate_lm(make_batch(1, rows))["loss"]
        return {
            "num_leftovers": len(leftovers),
            "losses": losses,
            "norm": norm,
            "after": after,
            "weights": full_weights(engine),
        }


def evaluate_loaded_weights(
    rank: int, world_size: int, config: dict[str, Any], folder: str
) -> tuple[float, float, float]:
    """Loss at first, after a step, and after loading the first weights back."""
    with running(config) as engine:
        batch = make_batch(0, own_rows(engine))
        engine.save(SaveLoadMeta(path=folder))
        first = engine.evaluate_lm(batch)["loss"]
        engine.train_lm(batch)
        trained = engine.evaluate_lm(batch)["loss"]
        engine.load(SaveLoadMeta(path=folder))
        return first, trained, engine.evaluate_lm(batch)["loss"]


def rebuild(rank: int, world_size: int, first: dict, second: dict) -> dict[str, Any]:
    """Destroy an engine and build another one in its place; nothing of the first may stay."""
    engine = FSDPLMEngine(TrainEngineConfig(**first))
    engine.initialize(ft_spec=SPEC)
    engine.train_lm(make_batch(0, own_rows(engine)))
    gc.disable()  # what stays must not be saved by chance
    try:
        watched = [weakref.ref(p) for p in engine.parts.model.parameters()]
        engine.destroy()
        alive = sum(reference() is not None for reference in watched)
    finally:
        gc.enable()
    engine.config = TrainEngineConfig(**second)
    engine.initialize(ft_spec=SPEC)
    stats = engine.train_lm(make_batch(0, own_rows(engine)))
    engine.destroy()
    return {"alive": alive, "stats": stats}


def refuse_batches(rank: int, world_size: int, config: dict[str, Any]) -> dict[str, Any]:
    """Let the last rank alone pass wrong batches; then a right one must still work."""
    broken = rank == world_size - 1
    with running(config) as engine:
        batch = make_batch(0, own_rows(engine))
        ragged = {**batch, "attention_mask": batch["attention_mask"].flip(1)}
        foreign = {**batch, "input_ids": batch["input_ids"] + 512}
        shifted = {**batch, "loss_mask": ~batch["loss_mask"]}
        answers = {
            name: answer(lambda given=given: engine.train_lm(given if broken else batch))
            for name, given in (("ragged", ragged), ("foreign", foreign), ("shifted", shifted))
        }
        return {**answers, "loss": engine.train_lm(batch)["loss"]}


def fail_to_initialize(
    rank: int, world_size: int, config: dict[str, Any], path: str
) -> list[tuple[str, str]]:
    """Give the last rank another path than the others."""
    if rank == world_size - 1:
        config = {**config, "path": path}
    engine = FSDPLMEngine(TrainEngineConfig(**config))
    said = answer(lambda: engine.initialize(ft_spec=SPEC))
    engine.destroy()
    return [said]


def fail_to_save(rank: int, world_size: int, config: dict[str, Any], folder: str) -> dict[str, Any]:
    """Let rank 0's disk be full in the middle of a save, then save again."""

    class FullDisk(hf.ShardWriter):
        def add(self, name: str, tensor: torch.Tensor) -> None:
            if "layers.0" in name:
                raise OSError(28, os.strerror(28))
            super().add(name, tensor)

    with running(config) as engine:
        engine.save(SaveLoadMeta(path=folder))
        before = sorted(path.name for path in Path(folder).iterdir())
        real, hf.ShardWriter = hf.ShardWriter, FullDisk
        try:
            said = answer(lambda: engine.save(SaveLoadMeta(path=folder)))
        finally:
            hf.ShardWriter = real
        after = sorted(path.name for path in Path(folder).iterdir())
        engine.save(SaveLoadMeta(path=folder))
        return {"said": said, "kept": before == after}


def ask_for_other_degrees(rank: int, world_size: int, config: dict[str, Any]) -> tuple[str, str]:
    with running(config) as engine:
        engine.create_process_group(engine.parallel_strategy)
        other = ParallelStrategy(tensor_parallel_size=world_size)
        return answer(lambda: engine.create_process_group(other))


def seed_dropout(rank: int, world_size: int, config: dict[str, Any]) -> tuple[int, list[float]]:
    """Return the generator's seed and the losses of two equal engines."""
    losses = []
    for _ in range(2):
        with running(config) as engine:
            losses.append(engine.train_lm(make_batch(0, own_rows(engine)))["loss"])
            seed = torch.initial_seed()
    return seed, losses


def forward_in_half_precision(rank: int, world_size: int, config: dict[str, Any]) -> Any:
    with running(config) as engine:
        engine.eval()
        values = engine.forward_batch(make_batch(0, own_rows(engine)))
        return values.dtype, values.numpy()


def train_without_rows(rank: int, world_size: int, config: dict[str, Any]) -> dict[str, Any]:
    """The last data-parallel rank has no sequence at all."""
    with running(config) as engine:
        empty = engine.data_parallel_rank == engine.data_parallel_world_size - 1
        batch = make_batch(0, slice(0, 0) if empty else slice(None))
        stats = engine.train_lm(batch)
        rows = engine.forward_batch(batch)
        return {"stats": stats, "shape": tuple(rows.shape)}


def weigh_by_thirds(rank: int, world_size: int, config: dict[str, Any]) -> dict[str, Any]:
    """Train with weights that bf16 cannot hold; report what went through the wrapped forward."""
    floating, kinds = [], []

    def look(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*args, *kwargs.values()]
        floating.extend(
            str(value.dtype)
            for value in given
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        )

    def weighed(inputs: LossInputs) -> LossOutputs:
        kinds.append(str(inputs.logprobs.dtype))
        outputs = sft_loss(inputs)
        weight = sft_loss_weight(inputs.microbatch)
        return LossOutputs(outputs.loss, {"weight": weight})

    with running(config) as engine:
        batch = make_batch(0, own_rows(engine))
        batch["loss_mask"] = batch["loss_mask"] / 3
        hook = engine.parts.model.register_forward_pre_hook(look, prepend=True, with_kwargs=True)
        stats = engine.train_batch(batch, weighed, sft_loss_weight)
        hook.remove()
        (kind,) = set(kinds)
        return {"floating_inputs": floating, "stats": stats, "logprobs": kind}
