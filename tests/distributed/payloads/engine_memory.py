"""The facade's memory options at work: offload between steps, checkpoints amid training, LoRA."""

from __future__ import annotations

from typing import Any

from fsdpbench.engine.config.checkpoint import SaveLoadMeta
from fsdpbench.errors import FsdpbenchError
from tests.distributed.payloads.engine_checks import own_rows, running
from tests.distributed.payloads.engine_proof import full_weights, make_batch


def train_steps(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        losses.append(engine.train_lm(make_batch(step, own_rows(engine)))["loss"])
        engine.lr_scheduler_step()
    return losses


def refusal(action: Any) -> str:
    try:
        action()
    except FsdpbenchError as error:
        return str(error)
    return ""


def offload_between_steps(rank: int, world_size: int, config: dict[str, Any]) -> dict[str, Any]:
    """Losses of four steps with and without offloads between them, and what is refused."""
    with running(config) as engine:
        plain = train_steps(engine, range(4))
    with running(config) as engine:
        losses = train_steps(engine, range(1))
        engine.offload()
        engine.offload()
        batch = make_batch(1, own_rows(engine))
        refused = [
            refusal(lambda: engine.train_lm(batch)),
            refusal(lambda: engine.evaluate_lm(batch)),
            refusal(lambda: engine.forward_batch(batch)),
            refusal(engine.optimizer_step),
            refusal(lambda: engine.save(SaveLoadMeta(path="never"))),
            refusal(lambda: engine.load(SaveLoadMeta(path="never"))),
        ]
        with engine.onloaded():
            losses += train_steps(engine, range(1, 2))
            with engine.onloaded():
                losses += train_steps(engine, range(2, 3))
        states = [engine.is_offloaded]
        engine.onload()
        with engine.offloaded():
            states.append(engine.is_offloaded)
            with engine.offloaded():
                pass
            states.append(engine.is_offloaded)
        losses += train_steps(engine, range(3, 4))
        return {"plain": plain, "losses": losses, "refused": refused, "states": states}


def resume(
    rank: int, world_size: int, first: dict, second: dict, folder: str, weight_format: str
) -> dict[str, Any]:
    """Train 2 steps, save with everything, go on; load into an engine of another mesh, go on."""
    asynchronous = weight_format == "dcp"
    meta = SaveLoadMeta(
        path=folder, weight_format=weight_format, with_optim=True, asynchronous=asynchronous
    )
    with running(first) as engine:
        train_steps(engine, range(2))
        engine.set_version(7)
        engine.save(meta)
        losses = train_steps(engine, range(2, 4))  # files are written meanwhile
        engine.wait_for_save()
        weights = full_weights(engine)
    with running(second) as engine:
        engine.load(meta.with_changes({"asynchronous": False}))
        version = engine.get_version()
        again = train_steps(engine, range(2, 4))
        return {
            "version": version,
            "losses": (losses, again),
            "weights": (weights, full_weights(engine)),
        }


def train_adapters(
    rank: int, world_size: int, config: dict[str, Any], folder: str
) -> dict[str, Any]:
    """Train adapters, save them, load them into a fresh engine; evaluate both."""
    meta = SaveLoadMeta(path=folder, weight_format="adapter")
    batch_number = 3
    with running(config) as engine:
        base = full_weights(engine)
        losses = train_steps(engine, range(3))
        after = full_weights(engine)
        engine.save(meta)
        names = [name for name, _ in engine.parts.model.named_trainable_parameters()]
        trained = engine.evaluate_lm(make_batch(batch_number, own_rows(engine)))["loss"]
    with running(config) as engine:
        fresh = engine.evaluate_lm(make_batch(batch_number, own_rows(engine)))["loss"]
        engine.load(meta)
        loaded = engine.evaluate_lm(make_batch(batch_number, own_rows(engine)))["loss"]
    return {
        "losses": losses,
        "moved": [n for n, value in base.items() if not (value == after[n]).all()],
        "trained": names,
        "evaluated": (fresh, trained, loaded),
    }
