"""One step over packed micro-batches: plan, run, reduce, read. Functions over `EngineParts`.

Schedule of a training step. The host plans micro-batches from CPU tensors and agrees on their
number over the data-parallel ranks (gloo, no device traffic). Then everything is enqueued without
a host read: each micro-batch's forward and backward, the gradient norm, clipping and the optimizer
step, whose skip verdict stays on the device. `read_stats` is the one host read, at the end.

Note: loss scaling
A loss function returns a sum over its weighted tokens. FSDP2 averages gradients over the dp x cp
ranks, so each micro-batch's sum is multiplied by (dp x cp) / W, where W is the global weight.
Ranks of one context group compute the same loss from gathered log-probabilities; the gather's
backward keeps only the rank's own slice, so their shares add up to one loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fsdpbench.engine.batching.containers import MicroBatchList, PackedMicroBatch
from fsdpbench.engine.batching.microbatch import (
    aggregate_eval_losses,
    check_same_batch,
    reduce_num_microbatches,
    split_into_microbatches,
)
from fsdpbench.engine.batching.packing import check_token_ids
from fsdpbench.engine.optim.clip import gradient_norm, plan_clipping
from fsdpbench.engine.parallel.agreement import Agreement
from fsdpbench.engine.parallel.attention import build_attention_context
from fsdpbench.engine.parallel.ulysses import gather_row, slice_row
from fsdpbench.engine.protocols import LossFn, LossInputs, LossOutputs
from fsdpbench.log import get_logger, warn_once

if TYPE_CHECKING:
    from fsdpbench.engine.setup import EngineParts

Batch = Mapping[str, torch.Tensor]
EVAL_MODE = (
    "training in evaluation mode: dropout and gradient_checkpointing have no effect; "
    "call engine.train() first"
)
logger = get_logger(__name__)


def plan_microbatches_over_ranks(parts: EngineParts, batch: Batch) -> MicroBatchList:
    """Cut a batch into packed micro-batches, as many on every data-parallel rank.

    A rank with fewer sequences fills up with masked dummies. A batch that one rank refuses stops
    all of them. Collective over: the world (CPU).
    """
    meshes, config = parts.meshes, parts.config
    split = partial(
        split_into_microbatches,
        batch,
        config.mb_spec,
        pad_multiple=meshes.strategy.tp_size * meshes.strategy.cp_size,
        pad_to_maximum=config.pad_to_maximum,
    )
    with Agreement("reading the batch", meshes.cpu_group):
        own = split()
        check_token_ids(batch, parts.model.facts.vocab_size)
    if meshes.cp_size * meshes.tp_size > 1:
        check_same_batch(batch, meshes.dp_rank, meshes.dp_size, meshes.cpu_group)
    count = reduce_num_microbatches(len(own), meshes.dp_cpu_group)
    if count == len(own):
        return own
    return split(num_microbatches=count)


def run_forward(
    parts: EngineParts, microbatch: PackedMicroBatch, *, with_entropy: bool
) -> LossInputs:
    """Run the model on one micro-batch that lies on the device. Collective over: the world.

    Returns token-aligned values of the whole packed row, on every context and tensor rank alike.
    """
    cp_group = parts.meshes.cp_group
    tokens = microbatch.tokens
    local = {
        name: slice_row(tokens[name], cp_group) for name in ("input_ids", "position_ids", "labels")
    }
    context = build_attention_context(microbatch, cp_group, parts.model.attention_kernel)
    logprobs, entropy = parts.model(
        local["input_ids"][None],
        position_ids=local["position_ids"][None],
        labels=local["labels"],
        context=context,
        temperature=parts.config.temperature,
        with_entropy=with_entropy,
    )
    return LossInputs(
        logprobs=align_with_tokens(logprobs, cp_group),
        entropy=None if entropy is None else align_with_tokens(entropy, cp_group),
        microbatch=microbatch,
    )


def align_with_tokens(values: torch.Tensor, cp_group: dist.ProcessGroup) -> torch.Tensor:
    """Gather next-token values over the context axis and move each to the token that it is about.

    values: [T / cp] -> [T]. The last position of each sequence holds 0, which lands on the first
    token of the sequence behind it. Collective over: cp.
    """
    return torch.roll(gather_row(values, cp_group), 1)


def run_microbatches(
    parts: EngineParts,
    microbatches: MicroBatchList,
    loss_fn: LossFn,
    total_weight: torch.Tensor,
    *,
    with_entropy: bool = False,
    forward_only: bool = False,
) -> list[LossOutputs]:
    """Run forward (and backward) of each micro-batch; gradients accumulate in the parameters.

    Collective over: the world. Each loss comes back unscaled, detached, on the device.
    """
    strategy = parts.meshes.strategy
    scale = strategy.dp_size * strategy.cp_size / float(total_weight)
    outputs = []
    if not (forward_only or parts.model.training):
        warn_once(logger, EVAL_MODE)
    with resharding(parts):
        for microbatch in microbatches:
            on_device = microbatch.map_tensors(parts.device.to_device)
            with parts.tracer.span("forward", "compute"), torch.set_grad_enabled(not forward_only):
                inputs = run_forward(parts, on_device, with_entropy=with_entropy)
                result = loss_fn(inputs)
            if not forward_only:
                with parts.tracer.span("backward", "compute"):
                    torch.autograd.backward(result.loss * scale)
            stats = {name: value.detach() for name, value in result.stats.items()}
            outputs.append(LossOutputs(result.loss.detach(), stats))
    return outputs


@contextmanager
def resharding(parts: EngineParts) -> Iterator[None]:
    """Free gathered parameters at the end of the `with` body. Local.

    After a forward pass FSDP2 keeps the root's parameters (without reshard_after_forward, every
    unit's) for the backward pass, which frees them. Without one they would stay: whoever asks for
    the parameters then gets the gathered copies in the compute dtype instead of the masters, and
    later forwards would use them in spite of a step or load in between.
    """
    try:
        yield
    finally:
        for unit in parts.units:
            unit.reshard()


def reduce_losses(
    parts: EngineParts, outputs: Sequence[LossOutputs], total_weight: torch.Tensor
) -> tuple[list[str], torch.Tensor]:
    """Sum losses and stats over micro-batches and data-parallel ranks, over the global weight.

    Returns names and an fp32 tensor [loss, *stats] on the device. Collective over: dp.
    """
    names = ["loss", *sorted(outputs[0].stats)]
    rows = [
        torch.stack([out.loss.float(), *(out.stats[name].float() for name in names[1:])])
        for out in outputs
    ]
    group = parts.meshes.dp_group if parts.meshes.dp_size > 1 else None
    return names, aggregate_eval_losses(rows, total_weight, group)


def apply_optimizer_step(parts: EngineParts) -> torch.Tensor:
    """Clip and step; return fp32 [norm, skipped] on the device, not yet read.

    A non-finite norm leaves parameters and states as they were. Collective over: the world.
    """
    optimizer, settings = parts.optimizer, parts.config.optimizer
    assert optimizer is not None  # the callers refuse engines built for inference
    assert settings is not None
    with parts.tracer.span("clip", "compute"):
        # norms of gradients that rest on the host are summed where that is fast
        norm = gradient_norm(parts.model.parameters(), compute_device=parts.device.torch_device)
        verdict = plan_clipping(norm, settings.gradient_clipping)
    with parts.tracer.span("optimizer", "compute"):
        optimizer.step(clip=verdict)
    return torch.stack([verdict.norm.float(), verdict.found_inf.float()])


def read_stats(names: Sequence[str], values: torch.Tensor) -> dict[str, float]:
    """Copy a step's figures to the host: the one documented host read of a step."""
    return dict(zip(names, values.tolist(), strict=True))


def run_forward_only(
    parts: EngineParts,
    microbatches: MicroBatchList,
    select: Callable[[LossInputs], torch.Tensor],
    *,
    with_entropy: bool = False,
) -> list[torch.Tensor]:
    """Collect one tensor [T] a micro-batch without gradients. Collective over: the world."""
    collected = []
    with resharding(parts):
        for microbatch in microbatches:
            on_device = microbatch.map_tensors(parts.device.to_device)
            with parts.tracer.span("forward", "compute"), torch.no_grad():
                inputs = run_forward(parts, on_device, with_entropy=with_entropy)
                collected.append(select(inputs))
    return collected
