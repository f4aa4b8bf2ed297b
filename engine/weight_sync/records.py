"""What trainer and rollout engines say to each other about weights: plain records, JSON both ways.

No torch: the HTTP client and the command line use them, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, Self

ALIGNMENT = 16  # bytes; a tensor in a packed bucket starts at a multiple of it
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor on the wire, under the name that the receiver knows."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # a key of ITEM_BYTES

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together, in this order."""

    index: int
    specs: tuple[TensorSpec, ...]
    packed: bool = True  # one flat run of bytes, each tensor aligned; else one message a tensor

    @property
    def offsets(self) -> tuple[int, ...]:
        """First byte of each tensor in the packed run."""
        return tuple(accumulate(map(_align, self.specs[:-1]), initial=0))

    @property
    def num_bytes(self) -> int:
        """Length of the packed run."""
        return sum(map(_align, self.specs))

    def to_json(self) -> dict[str, Any]:
        """Return values that JSON holds."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build the record from what `to_json` returned."""
        specs = tuple(
            TensorSpec(item["name"], tuple(item["shape"]), item["dtype"])
            for item in values["specs"]
        )
        return cls(values["index"], specs, values["packed"])


@dataclass(frozen=True)
class GroupAddress:
    """Where a weight-update group meets, and a receiver's place in it; the trainer is rank 0."""

    host: str
    port: int  # bound by the trainer before anybody hears of it
    name: str
    world_size: int
    first_rank: int  # the receiver's ranks are first_rank, first_rank + 1, ...
    backend: str  # nccl or gloo
    timeout_seconds: float
    stage: int = 0  # pipeline stage of the receiver that this group serves
    greets: bool = True  # members report through the store before they connect; servers cannot
    unique_id: str = ""  # base64 of an ncclUniqueId, for receivers that join over raw NCCL (vLLM)


@dataclass(frozen=True)
class ReceiverTraits:
    """What a rollout engine can do with weights."""

    dialect: str  # local, vllm or sglang
    world_size: int = 1  # its ranks that join a weight-update group, in each stage
    pipeline_size: int = 1  # stages, each with a group of its own
    takes_packed: bool = True  # else one message a tensor
    takes_adapters: bool = False
    gives_digests: bool = False  # `finish_weight_update` tells what arrived
    joins_by_id: bool = False  # of an NCCL communicator; else through the group's store
    channels: tuple[str, ...] = ("xccl", "disk")


def _align(spec: TensorSpec) -> int:
    return -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT
