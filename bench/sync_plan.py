"""Where receivers of weights run, and why a trial that sends weights may be none. Pure.

Receivers take the GPUs behind the trainer's. Where these do not suffice they share GPUs with the
trainer, which only the disk channel allows: NCCL refuses two ranks of one group on one device.
"""

from __future__ import annotations

from fsdpbench.bench.records import DeviceName, WorkloadSpec
from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.errors import Violation

DEFAULT_SYNC_ROUNDS = 5
SYNC_AXES = ("weight_update_mode", "sync_receivers", "sync_bucket_mb", "sync_verify")
"""Fields that matter to weight updates only: who varies one wants updates."""


def place_receivers(
    device: DeviceName, world_size: int, num_receivers: int, num_gpus: int
) -> list[str]:
    """Return each receiver's device, as `cuda:1` or `cpu`."""
    if device == "cpu":
        return ["cpu"] * num_receivers
    behind = list(range(world_size, num_gpus)) or list(range(num_gpus))
    return [f"cuda:{behind[index % len(behind)]}" for index in range(num_receivers)]


def check_sync(
    workload: WorkloadSpec,
    config: TrainEngineConfig,
    *,
    device: DeviceName,
    world_size: int,
    num_gpus: int,
) -> list[Violation]:
    """Return why the trial cannot send its weights; nothing if it sends none."""
    needed = world_size + workload.sync_receivers
    if not workload.syncs or device == "cpu" or config.weight_update_mode == "disk":
        return []
    if needed <= num_gpus:
        return []
    allowed = (
        f"needs {needed} GPUs, {world_size} for the trainer and one for each receiver, and there "
        f"are {num_gpus}: NCCL refuses two ranks on one device"
    )
    remedy = "use weight_update_mode disk"
    if num_gpus > workload.sync_receivers:
        remedy += f", or train on {num_gpus - workload.sync_receivers} of them"
    return [Violation("weight_update_mode", "'xccl'", allowed, remedy)]


def drop_unused(workload: WorkloadSpec) -> dict[str, object]:
    """Return the workload as plain values, without the fields of updates if it has none.

    So the same training is the same work, whatever it says of updates that do not happen.
    """
    values = workload.model_dump(mode="json")
    if workload.syncs:
        return values
    return {name: value for name, value in values.items() if not name.startswith("sync_")}
