"""Which tensors travel together, and to which pipeline stage. Arithmetic only, done once.

The sender walks through the model once, in the model's order, and has one bucket open at a time. So
a bucket is a run of neighbours in that order that go to the same stage; a tensor that two stages
need stands in two runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from fsdpbench.engine.weight_sync.records import ALIGNMENT, Bucket, TensorSpec
from fsdpbench.errors import WeightSyncError

MIB = 1 << 20
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
FIRST_STAGE = ("embed_tokens.",)  # what has no layer and is not here goes to the last stage


@dataclass(frozen=True)
class StagedBucket:
    """A bucket and the pipeline stage that it goes to."""

    stage: int
    bucket: Bucket


def plan_buckets(
    specs: Iterable[TensorSpec], max_bytes: int, packed: bool = True, first_index: int = 0
) -> tuple[Bucket, ...]:
    """Cut the tensors, in their order, into buckets of at most `max_bytes`.

    A larger tensor has a bucket of its own. A name that comes again (a tied weight) travels once.
    """
    buckets: list[list[TensorSpec]] = []
    filled = 0
    for spec in {spec.name: spec for spec in specs}.values():
        num_bytes = -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT
        if not buckets or filled + num_bytes > max_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(spec)
        filled += num_bytes
    return tuple(
        Bucket(index, tuple(part), packed) for index, part in enumerate(buckets, first_index)
    )


def plan_update(
    specs: Sequence[TensorSpec],
    max_bytes: int,
    *,
    packed: bool = True,
    stages_of: Callable[[str], tuple[int, ...]] = lambda name: (0,),
) -> tuple[StagedBucket, ...]:
    """Order all buckets of an update as the sender fills them; `stages_of` a name says whither."""
    runs = [(stage, spec) for spec in specs for stage in stages_of(spec.name)]
    planned: list[StagedBucket] = []
    for stage, run in groupby(runs, key=lambda item: item[0]):
        members = [spec for _, spec in run]
        buckets = plan_buckets(members, max_bytes, packed, first_index=len(planned))
        planned.extend(StagedBucket(stage, bucket) for bucket in buckets)
    return tuple(planned)


def last_but_one_first(num_layers: int, pipeline_size: int) -> tuple[int, ...]:
    """Layers of each stage as vLLM counts (`get_pp_indices`).

    What is left over goes to the stages from the last but one backwards, since the last has the
    head and the first the embedding.
    """
    even, extra = divmod(num_layers, pipeline_size)
    first = pipeline_size - 1 - extra
    return tuple(even + (first <= stage < pipeline_size - 1) for stage in range(pipeline_size))


def last_first(num_layers: int, pipeline_size: int) -> tuple[int, ...]:
    """Layers of each stage as SGLang counts: the last stages have one more."""
    even, extra = divmod(num_layers, pipeline_size)
    return tuple(even + (stage >= pipeline_size - extra) for stage in range(pipeline_size))


LAYER_COUNTS: Mapping[str, Callable[[int, int], tuple[int, ...]]] = {
    "local": last_but_one_first,
    "vllm": last_but_one_first,
    "sglang": last_first,
}


@dataclass(frozen=True)
class StageMap:
    """How a rollout engine divides a model over its pipeline stages; tells a name's stages."""

    num_layers: int
    pipeline_size: int
    dialect: str = "local"
    is_tied: bool = False  # then the last stage needs the embedding as its head

    def __post_init__(self) -> None:
        if not 1 <= self.pipeline_size <= self.num_layers:
            raise WeightSyncError(
                f"pipeline_size={self.pipeline_size}: a model of {self.num_layers} layers has "
                f"1..{self.num_layers} stages"
            )

    def __call__(self, name: str) -> tuple[int, ...]:
        """Return the stages that need the tensor, ascending."""
        last = self.pipeline_size - 1
        match = LAYER.search(name)
        if match:
            counts = LAYER_COUNTS[self.dialect](self.num_layers, self.pipeline_size)
            ends = accumulate(counts)
            return (next(s for s, end in enumerate(ends) if int(match[1]) < end or s == last),)
        if not any(part in name for part in FIRST_STAGE):
            return (last,)
        return (0, last) if self.is_tied and last else (0,)


def split_stages(
    specs: Iterable[TensorSpec], stages_of: StageMap
) -> tuple[tuple[TensorSpec, ...], ...]:
    """Return the tensors of each stage, in their order."""
    parts: list[list[TensorSpec]] = [[] for _ in range(stages_of.pipeline_size)]
    for spec in specs:
        for stage in stages_of(spec.name):
            parts[stage].append(spec)
    return tuple(map(tuple, parts))


def rename(bucket: Bucket, name_of: Callable[[str], str]) -> Bucket:
    """Return the bucket under a receiver's names; the bytes on the wire are the same."""
    return replace(
        bucket, specs=tuple(replace(spec, name=name_of(spec.name)) for spec in bucket.specs)
    )
