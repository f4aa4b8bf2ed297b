"""What a GPU holds beside torch's reserved memory, as measured constants, and how much it has.

device total = reserved + context + communicators + kernels

Boundary: constants and sums. What is reserved comes from the replay of the allocator, how many
communicators a mesh makes from the engine; nothing here asks a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fsdpbench.errors import ConfigError, Violation
from fsdpbench.units import MIB


@dataclass(frozen=True)
class Footprint:
    """Bytes of one process on one GPU that torch's allocator does not count."""

    context_bytes: int  # CUDA context, with torch's libraries loaded
    lone_communicator_bytes: int  # the first communicator of NCCL, over one rank
    first_communicator_bytes: int  # the first one over several ranks
    further_communicator_bytes: int  # each one after it
    kernels_bytes: int  # kernels loaded, and memory reserved for them, once a step has run
    measured_on: str


# Note: what was fitted on what. All of it is memory use as NVML says it, less what torch had
# reserved, on H200 GPUs with driver 580.159, torch 2.11.0+cu130 and NCCL 2.28.9.
# - context, first and further communicators: read off a process as it made them one after another,
#   on one GPU and on two (612, 1170, 1452 and 1452 + 446 MiB in all).
# - kernels: 1309 - 1170 MiB, where 1309 is the median of the 19 training points on one GPU in
#   docs/measurements/h200-2026-12-01.jsonl. The same 139 MiB give 1591 and 2037 MiB on two GPUs
#   with one and two communicators; docs/lab.md has 1.56 and 1.99 GiB there, 1597 and 2038 MiB.
# Not fitted: the per-layer optimizer step (26 MiB more) and offload (30 MiB more, 56 with both).
# Not measured: more than two ranks in a communicator, several nodes, any other GPU or version.
H200_FOOTPRINT = Footprint(
    context_bytes=612 * MIB,
    lone_communicator_bytes=(1170 - 612) * MIB,
    first_communicator_bytes=(1452 - 612) * MIB,
    further_communicator_bytes=446 * MIB,
    kernels_bytes=(1309 - 1170) * MIB,
    measured_on="H200, driver 580.159, torch 2.11.0+cu130, NCCL 2.28.9",
)
MOST_RANKS_MEASURED = 2


class Gpu(NamedTuple):
    """A type of GPU: all of its memory as nvidia-smi shows it, and what a process takes of it."""

    memory_bytes: int
    source: str
    footprint: Footprint
    is_measured: bool  # the memory and the footprint were read on such a GPU by this project


LISTED = "nvidia-smi, as listed at https://thundergolfer.com/blog/nvidia-gpu-memory-capacity"

# A GPU that is not measured has the H200's footprint, for want of a better one.
GPUS: dict[str, Gpu] = {
    "h200": Gpu(143771 * MIB, "NVML, driver 580.159.03", H200_FOOTPRINT, is_measured=True),
    "h100-80g": Gpu(81559 * MIB, LISTED, H200_FOOTPRINT, is_measured=False),
    "a100-80g": Gpu(81920 * MIB, LISTED, H200_FOOTPRINT, is_measured=False),
    "a100-40g": Gpu(40960 * MIB, LISTED, H200_FOOTPRINT, is_measured=False),
    "l40s": Gpu(46068 * MIB, LISTED, H200_FOOTPRINT, is_measured=False),
    "a10": Gpu(23028 * MIB, LISTED, H200_FOOTPRINT, is_measured=False),
    "l4": Gpu(23034 * MIB, LISTED, H200_FOOTPRINT, is_measured=False),
    "b200": Gpu(
        183359 * MIB,
        "nvidia-smi, driver 580.95.05, https://github.com/NVIDIA/TensorRT-LLM/issues/10278",
        H200_FOOTPRINT,
        is_measured=False,
    ),
}


class DeviceTotal(NamedTuple):
    """Bytes in use on a GPU, as nvidia-smi would show them for this process alone."""

    num_bytes: int
    is_measured: bool  # rests on readings of such a GPU, with communicators of such a size


def find_gpu(name: str) -> Gpu:
    """Return the entry of a type of GPU; an unknown name is refused with the known ones."""
    if name not in GPUS:
        raise ConfigError([Violation("gpu", name, f"must be one of {', '.join(GPUS)}")])
    return GPUS[name]


def device_overhead(gpu: str, num_communicators: int, num_ranks: int = 1) -> DeviceTotal:
    """Return the bytes beside the reserved ones, once a training step has run.

    `num_communicators` counts the NCCL communicators that this rank has used; `num_ranks` is the
    number of ranks in the largest. The GPU's memory less these bytes is the replay's limit.
    """
    entry = find_gpu(gpu)
    footprint = entry.footprint
    num_bytes = footprint.context_bytes + footprint.kernels_bytes
    if num_communicators:
        is_alone = num_ranks == 1
        num_bytes += (
            footprint.lone_communicator_bytes if is_alone else footprint.first_communicator_bytes
        )
        num_bytes += (num_communicators - 1) * footprint.further_communicator_bytes
    return DeviceTotal(num_bytes, entry.is_measured and num_ranks <= MOST_RANKS_MEASURED)


def device_total(
    reserved_bytes: int, gpu: str, num_communicators: int, num_ranks: int = 1
) -> DeviceTotal:
    """Return the bytes in use on the GPU at a peak of torch's reserved memory."""
    overhead = device_overhead(gpu, num_communicators, num_ranks)
    return DeviceTotal(reserved_bytes + overhead.num_bytes, overhead.is_measured)
