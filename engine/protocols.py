"""Contracts between the engine, its objectives and the code around it; torch for types only.

A loss is a pure function of one record. It returns the weighted *sum* over its tokens (or
sequences); the engine divides by the global weight over all micro-batches and data-parallel ranks,
so that the gradient does not depend on how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from fsdpbench.engine.batching.containers import PackedMicroBatch


@dataclass(frozen=True)
class LossInputs:
    """What a loss may look at: model outputs over one packed micro-batch, and the batch."""

    logprobs: (
        torch.Tensor
    )  # [T] fp32, log p(token t | tokens before it); 0 at first tokens and padding
    entropy: torch.Tensor | None  # [T] fp32, aligned as logprobs; None unless it was asked for
    microbatch: PackedMicroBatch


@dataclass(frozen=True)
class LossOutputs:
    """A loss as the weighted sum over the micro-batch, and sums to be reported beside it."""

    loss: torch.Tensor  # 0-D
    stats: Mapping[str, torch.Tensor] = field(default_factory=dict)  # 0-D sums, reduced over dp


LossFn = Callable[[LossInputs], LossOutputs]
LossWeightFn = Callable[["PackedMicroBatch"], "torch.Tensor"]  # 0-D CPU tensor, >= 0


class WorkflowLike(Protocol):
    """One episode of data collection: from a sample and a generator to training tensors."""

    async def arun_episode(
        self, engine: Any, data: Mapping[str, Any]
    ) -> Mapping[str, torch.Tensor] | None:
        """Run one episode; None means that the sample is to be dropped."""
        ...


NamedTensors = Iterable[tuple[str, "torch.Tensor"]]
