"""An engine that trains and its local rollout processes: updates through both channels."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from fsdpbench.engine.config.weight_sync import WeightUpdateMeta
from fsdpbench.engine.rollout.local import LocalSettings, launch_local_engines
from fsdpbench.errors import FsdpbenchError
from tests.distributed.payloads.engine_checks import own_rows, running
from tests.distributed.payloads.engine_proof import make_batch

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]


def update_twice(
    rank: int, world_size: int, config: dict[str, Any], folder: str, num_receivers: int
) -> dict[str, Any]:
    """Train a step and update over xccl, train another and update over the disk."""
    batch = {"input_ids": [PROMPT], "attention_mask": [[1] * len(PROMPT)]}
    with running(config) as engine, ExitStack() as stack:
        receivers = []
        if rank == 0:
            settings = LocalSettings(
                str(engine.parts.source), "float32", version=None, num_threads=1
            )
            receivers = launch_local_engines([settings] * num_receivers)
            for receiver in receivers:
                stack.callback(receiver.close)
        meta = WeightUpdateMeta(
            wire_dtype="float32", verify=True, weight_chunked_mem_mb=1, timeout_seconds=60
        )
        before = refusal(lambda: engine.update_weights())
        engine.connect_engine(receivers or None, meta)
        found = []
        for version, channel in enumerate(
            (meta, meta.with_changes({"type": "disk", "path": folder}))
        ):
            engine.train_lm(make_batch(version, own_rows(engine)))
            engine.set_version(version + 1)
            timings = engine.update_weights(channel)
            own = engine.forward_batch(to_tensors(batch))[0, 1:].tolist()
            answers = [(r.get_version(), r.compute_logprobs([PROMPT])[0]) for r in receivers]
            found.append({"timings": timings.to_json(), "own": own, "answers": answers})
        engine.disconnect_engine()
        return {"before": before, "rounds": found}


def to_tensors(batch: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {
        "input_ids": torch.tensor(batch["input_ids"]),
        "attention_mask": torch.tensor(batch["attention_mask"], dtype=torch.bool),
    }


def refusal(action: Any) -> str:
    try:
        action()
    except FsdpbenchError as error:
        return str(error)
    return ""
