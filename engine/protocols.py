"""Contracts between the engine, its objectives and the code around it; torch for types only.

A loss is a pure function of one record. It returns the weighted *sum* over its tokens (or
sequences); the engine divides by the global weight over all micro-batches and data-parallel ranks,
so that the gradient does not depend on how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from fsdpbench.engine.batching.containers import PackedMicroBatch
    from fsdpbench.engine.weight_sync.records import Bucket, GroupAddress, ReceiverTraits


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


class InferenceEngine(Protocol):
    """A rollout engine as the trainer's rank 0 sees it; the names are the guide's.

    Methods that return a Future return at once and end within the group's time-out; its exception
    says what went wrong on the other side. An update is: pause_generation, then for xccl one
    update_weights_from_distributed a bucket (init_weights_update_group before the first), for disk
    one update_weights_from_disk, then finish_weight_update, then continue_generation. Between the
    first bucket and the finish the engine must refuse to generate; an update that does not finish
    leaves it refusing until one does.
    """

    @property
    def traits(self) -> ReceiverTraits:
        """What the engine can do with weights."""
        ...

    def pause_generation(self, in_flight: str = "abort") -> None:
        """Stop generating: `abort` what runs (clients resubmit it), or `wait` for it."""
        ...

    def continue_generation(self) -> None:
        """Generate again, with the weights of the last finished update and an empty cache."""
        ...

    def init_weights_update_group(self, address: GroupAddress) -> Future[None]:
        """Join the group; the trainer joins meanwhile."""
        ...

    def update_weights_from_distributed(self, bucket: Bucket, stage: int = 0) -> Future[None]:
        """Receive and apply one bucket; the trainer broadcasts meanwhile."""
        ...

    def update_weights_from_disk(self, path: str, version: int) -> Future[None]:
        """Load a complete Hugging Face folder (or folder of adapters)."""
        ...

    def finish_weight_update(
        self, version: int, with_digests: bool = False
    ) -> Future[Mapping[str, str]]:
        """Put the new weights into force as `version`; return digests by name if asked and able."""
        ...

    def abort_weight_update(self, reason: str) -> None:
        """Give up an update that cannot finish. Never raises."""
        ...

    def destroy_weights_update_group(self) -> None:
        """Leave the group. Never raises."""
        ...

    def get_version(self) -> int:
        """Return the version in force; -1 while an update is under way or was broken off."""
        ...

    def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log p(token | tokens before it) of each token but the first, per sequence."""
        ...
