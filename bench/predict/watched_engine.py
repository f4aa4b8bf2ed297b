"""The engine's training steps under a memory tracker, on whatever device the engine is.

The boundary: it feeds the engine the batches of a trial, takes the engine's spans for phases and
says whose memory is whose. It neither builds nor computes anything itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice

import torch

from fsdpbench.bench.documents import load_workload
from fsdpbench.bench.predict.trace import Category
from fsdpbench.bench.predict.tracker import MemoryTracker
from fsdpbench.bench.records import WorkloadSpec
from fsdpbench.bench.tokens import choose_encoder
from fsdpbench.bench.workloads import StepBatch, iterate_batches
from fsdpbench.engine.algorithms.sft import FSDPLMEngine
from fsdpbench.engine.config.train import FinetuneSpec
from fsdpbench.engine.device import Device
from fsdpbench.engine.models.facts import read_model_config
from fsdpbench.engine.models.load import load_tokenizer
from fsdpbench.engine.optim.shards import local_tensor
from fsdpbench.engine.tracing.tracer import Tracer

NUM_STEPS = 2  # the first makes the optimizer's states, the second is like all later ones
PHASES = ("build", "load", "forward", "backward", "clip", "optimizer")
SCHEDULE = FinetuneSpec(total_train_epochs=1, dataset_size=NUM_STEPS, train_batch_size=1)


def train_watched(engine: FSDPLMEngine, workload: WorkloadSpec, tracer: PhaseTracer) -> None:
    """Train an initialized engine for two steps, or for one if the workload has no more.

    `tracer` is the engine's own. Collective over: the world.
    """
    tracer.engine = engine
    watch_head(engine, tracer.tracker)
    for batch in islice(plan_batches(engine, workload), NUM_STEPS):
        tracer.step += 1
        engine.train_lm(batch.tensors)
        engine.lr_scheduler_step()
    tracer.claim_owned()


def plan_batches(engine: FSDPLMEngine, workload: WorkloadSpec) -> Iterator[StepBatch]:
    """Return the batches that this rank of a trial would train on."""
    source = engine.parts.source
    tokenizer = load_tokenizer(source, trust_remote_code=engine.config.trust_remote_code)
    positions = read_model_config(str(source)).get("max_position_embeddings")
    return iterate_batches(
        workload,
        load_workload(workload, engine.data_parallel_world_size),
        choose_encoder(tokenizer),
        dp_rank=engine.data_parallel_rank,
        dp_size=engine.data_parallel_world_size,
        vocab_size=engine.model_facts.vocab_size,
        longest=positions or sys.maxsize,
    )


def watch_head(engine: FSDPLMEngine, tracker: MemoryTracker) -> None:
    """Tell the tracker when the forward pass leaves the decoder for the head and the loss."""
    model = engine.parts.model
    decoder = model.backbone.get_submodule(model.facts.family.base_model)

    def leave_decoder(*_: object) -> None:
        tracker.in_head = True

    decoder.register_forward_hook(leave_decoder)


class PhaseTracer(Tracer):
    """Takes the engine's spans for the phases of the simulation."""

    def __init__(self, rank: int, device: Device, tracker: MemoryTracker) -> None:
        super().__init__(rank, device, enabled=False)
        self.tracker = tracker
        self.step = 0
        self.engine: FSDPLMEngine | None = None  # once it is built

    def span(self, name: str, category: str = "compute") -> AbstractContextManager[None]:
        """Begin a phase; it lasts until the next one begins."""
        return self._phase(name) if name in PHASES else super().span(name, category)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self.claim_owned()
        self.tracker.enter_phase(self.step, name)
        yield

    def claim_owned(self) -> None:
        """Name the memory that the engine holds on to."""
        if self.engine is None:
            return
        parts = self.engine.parts
        parameters = list(parts.model.parameters())
        states = parts.optimizer.state.values() if parts.optimizer else ()
        with torch.no_grad(), self.tracker.pause():
            owned = {
                Category.PARAMETERS: [*map(local_tensor, parameters), *parts.model.buffers()],
                Category.GRADIENTS: [
                    local_tensor(p.grad) for p in parameters if p.grad is not None
                ],
                Category.OPTIMIZER: [
                    local_tensor(value)
                    for state in states
                    for value in state.values()
                    if isinstance(value, torch.Tensor)
                ],
            }
            for category, tensors in owned.items():
                self.tracker.claim(tensors, category)
