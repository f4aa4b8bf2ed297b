"""What a simulation tells: every block of device memory in order, and the peaks of its phases.

Data and arithmetic, no torch. Bytes of peaks are rounded to 512 a block, as the allocator does;
events carry what was requested, so that a replay can round for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from fsdpbench.bench.predict.events import MemoryEvent

ROUNDING_BYTES = 512


class Category(StrEnum):
    """What a block of memory is for."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    FSDP_BUFFERS = "fsdp_buffers"  # gathered parameters, buffers of all-gather and reduce-scatter
    ACTIVATIONS = "activations"  # outlive the layer that made them, or are its recomputation
    LOGITS_AND_LOSS = "logits_and_loss"
    WORKSPACES = "workspaces"  # of kernels
    TEMPORARIES = "temporaries"


@dataclass(frozen=True)
class PhaseMark:
    """From which event on a phase runs; build, load and init belong to step 0."""

    step: int
    phase: str
    first_event: int


@dataclass(frozen=True)
class PhasePeak:
    """The most bytes allocated at once within one phase of one step."""

    step: int
    phase: str
    peak_bytes: int
    end_bytes: int  # still allocated when it was over
    split: dict[Category, int]  # of the peak


@dataclass(frozen=True)
class Trace:
    """One rank's memory over the build and the training steps."""

    rank: int
    world_size: int
    attention_kernel: str
    events: list[MemoryEvent]
    categories: dict[int, Category]  # of each block id; ids are given once in a trace
    phases: list[PhasePeak]
    notes: list[str] = field(default_factory=list)  # what was simulated otherwise than asked for

    @property
    def peak_phase(self) -> PhasePeak:
        """The phase with the highest peak."""
        return max(self.phases, key=lambda phase: phase.peak_bytes)


def round_block(num_bytes: int) -> int:
    """Return what a request of this size takes."""
    return -(-num_bytes // ROUNDING_BYTES) * ROUNDING_BYTES


def measure_phases(
    events: Sequence[MemoryEvent],
    categories: dict[int, Category],
    marks: Sequence[PhaseMark],
) -> list[PhasePeak]:
    """Return the peak of each phase in the order of their first appearance.

    A phase that comes again in its step (micro-batches) is one, with the higher of its peaks.
    """
    live: Counter[Category] = Counter()
    total = 0
    found: dict[tuple[int, str], PhasePeak] = {}
    ends = [mark.first_event for mark in marks[1:]] + [len(events)]
    for mark, end in zip(marks, ends, strict=True):
        peak, split = total, dict(live)
        for event in events[mark.first_event : end]:
            change = round_block(event.num_bytes) * (1 if event.kind == "alloc" else -1)
            live[categories[event.block_id]] += change
            total += change
            if total > peak:
                peak, split = total, dict(live)
        key = (mark.step, mark.phase)
        if key in found and found[key].peak_bytes >= peak:
            peak, split = found[key].peak_bytes, found[key].split
        nonzero = {category: bytes_ for category, bytes_ in split.items() if bytes_}
        found[key] = PhasePeak(mark.step, mark.phase, peak, total, nonzero)
    return list(found.values())
