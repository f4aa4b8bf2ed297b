"""One rank's batch as micro-batches, and their outputs back as rows.

Planning is pure. Ranks must run equal numbers of micro-batches: each plans its own, the caller
takes the maximum over the data-parallel axis (`reduce_num_microbatches`) and every rank splits into
that number. The functions that communicate say so.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fsdpbench.engine.batching.containers import MicroBatchList, PackedMicroBatch
from fsdpbench.engine.batching.packing import Batch, pack, read_lengths
from fsdpbench.engine.batching.partition import Groups, partition_ffd, partition_kk_capped
from fsdpbench.errors import ConfigError, Violation, list_names

if TYPE_CHECKING:
    from fsdpbench.engine.config.batching import MicroBatchSpec
    from fsdpbench.engine.protocols import LossWeightFn

PARTITIONS = {"ffd": partition_ffd, "kk": partition_kk_capped}


def plan_microbatches(
    lengths: Sequence[int], spec: MicroBatchSpec, num_groups_min: int = 1
) -> Groups:
    """Assign rows to micro-batches; at least `num_groups_min` and `spec.n_mbs` of them.

    Any number that is a multiple of the divisor and not below the plan's own size is met exactly.
    """
    partition = PARTITIONS[spec.packing_algorithm]
    return partition(
        lengths,
        spec.max_tokens_per_mb,
        max(spec.n_mbs, num_groups_min),
        spec.n_mbs_divisor,
        spec.granularity,
    )


def split_into_microbatches(
    batch: Batch,
    spec: MicroBatchSpec,
    *,
    pad_multiple: int = 1,
    pad_to_maximum: bool = False,
    num_microbatches: int | None = None,
) -> MicroBatchList:
    """Plan and pack a batch; `num_microbatches` is the number agreed between the ranks.

    `pad_to_maximum` pads each micro-batch to `max_tokens_per_mb`, or without a cap to the longest
    of this rank's micro-batches; dummies stay as short as `pad_multiple` allows.
    """
    lengths = read_lengths(batch)
    groups = plan_microbatches(lengths, spec, num_microbatches or 1)
    if num_microbatches is not None and len(groups) != num_microbatches:
        allowed = f"this rank needs at least {len(groups)}"
        remedy = f"agree on the maximum over ranks, a multiple of {spec.n_mbs_divisor}"
        raise ConfigError([Violation("num_microbatches", str(num_microbatches), allowed, remedy)])
    pad_to = 0
    if pad_to_maximum:
        longest = max(sum(lengths[row] for row in group) for group in groups)
        pad_to = spec.max_tokens_per_mb or longest
    return MicroBatchList(
        microbatches=tuple(
            pack(batch, group, pad_multiple, pad_to if group else 0) for group in groups
        ),
        num_sequences=len(lengths),
        num_positions=batch["input_ids"].shape[1],
    )


def reorder_and_pad_outputs(
    outputs: Sequence[torch.Tensor],
    microbatches: MicroBatchList,
    output_seqlens: Sequence[int] | None = None,
    aggregate_fn: Callable[[list[torch.Tensor]], torch.Tensor] = torch.cat,
) -> torch.Tensor:
    """Undo packing: outputs [T, ...] of each micro-batch become rows [B, L, ...], 0 after the ends.

    `output_seqlens` are the values per row of the batch; L is then the longest row. By default they
    are one a token, and L is the batch's width. What an output holds beyond the values of its
    micro-batch's sequences is padding and dropped.
    """
    if output_seqlens is None:
        lengths, width = microbatches.row_lengths, microbatches.num_positions
    else:
        lengths, width = list(output_seqlens), max(output_seqlens)
    order = [row for microbatch in microbatches for row in microbatch.sequence_indices]
    kept = [
        output[: sum(lengths[row] for row in microbatch.sequence_indices)]
        for output, microbatch in zip(outputs, microbatches, strict=True)
    ]
    packed = aggregate_fn(kept)
    rows = packed.new_zeros((len(lengths), width, *packed.shape[1:]))
    for row, values in zip(
        order, torch.split(packed, [lengths[row] for row in order]), strict=True
    ):
        rows[row, : lengths[row]] = values
    return rows


def reduce_num_microbatches(num_local: int, dp_group: dist.ProcessGroup | None) -> int:
    """Return the largest number of micro-batches of any rank. Group of CPU tensors.

    Collective over: dp.
    """
    count = torch.tensor(num_local)
    if dp_group is not None:
        dist.all_reduce(count, dist.ReduceOp.MAX, group=dp_group)
    return int(count)


def compute_total_loss_weight(
    microbatches: Sequence[PackedMicroBatch] | MicroBatchList,
    loss_weight_fn: LossWeightFn,
    dp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Sum the loss weights of all micro-batches and ranks: a 0-D float64 CPU tensor, above 0.

    Wants the micro-batches on the CPU and a group of CPU tensors. A function that fails on one rank
    makes all raise. Collective over: dp.
    """
    total = torch.full((), math.nan, dtype=torch.float64)  # what peers hear of a failure here
    try:
        weights = [loss_weight_fn(microbatch).detach() for microbatch in microbatches]
        total.copy_(sum(weights, torch.zeros_like(total)))
    finally:
        if dp_group is not None:
            dist.all_reduce(total, group=dp_group)
    if not total > 0:
        allowed = "the weights over all micro-batches and ranks must add up to more than 0"
        remedy = "check the batch's loss_mask and the errors of other ranks"
        raise ConfigError([Violation("loss_weight_fn", f"{float(total)} in all", allowed, remedy)])
    return total


def check_same_batch(
    batch: Batch, replica: int, num_replicas: int, group: dist.ProcessGroup
) -> None:
    """Refuse a batch that differs between ranks which work on the same data.

    Such ranks would mix tokens of two batches or wait for each other for ever. `replica` is the
    data-parallel index of this rank; the batch lies on the CPU.
    Collective over: the group, which serves CPU tensors.
    """
    digest = 0
    for name in sorted(batch):
        values = batch[name].contiguous().flatten().view(torch.uint8).numpy().tobytes()
        digest = zlib.crc32(values, zlib.crc32(f"{name}{list(batch[name].shape)}".encode(), digest))
    unheard = -(1 << 32)  # of a replica that no rank of the group spoke for
    largest = torch.full((2, num_replicas), unheard)
    largest[0, replica], largest[1, replica] = digest, -digest
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    differs = (largest[0] != -largest[1]) & (largest[0] != unheard)
    differing = differs.nonzero().flatten().tolist()
    if differing:
        found = (
            f"differs between the ranks of data-parallel index {list_names(map(str, differing))}"
        )
        remedy = "pass the same tensors to all ranks of one context x tensor group"
        raise ConfigError([Violation("batch", "", found, remedy)])


def aggregate_eval_losses(
    losses: Sequence[torch.Tensor],
    total_loss_weight: torch.Tensor | float,
    dp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Turn the micro-batches' weighted sums into the mean over all ranks, element by element.

    A loss is 0-D; a row [figures] sums several at once. No host read.
    Collective over: dp (a group that serves the losses' device).
    """
    total = torch.stack([loss.detach() for loss in losses]).sum(dim=0)
    if dp_group is not None:
        dist.all_reduce(total, group=dp_group)
    return total / total_loss_weight
