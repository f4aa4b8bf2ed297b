"""Data-parallel ranks with unequal batches, against all rows in one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from fsdpbench.engine.batching.microbatch import (
    aggregate_eval_losses,
    check_same_batch,
    compute_total_loss_weight,
    reduce_num_microbatches,
    split_into_microbatches,
)
from fsdpbench.engine.config.batching import MicroBatchSpec
from fsdpbench.engine.ops.logprobs import fused_logprobs
from fsdpbench.engine.ops.sft_loss import sft_loss, sft_loss_weight
from fsdpbench.engine.protocols import LossInputs
from fsdpbench.errors import ConfigError

LENGTHS = [7, 1, 12, 5, 9, 4]
ROWS_OF_RANK = {0: [0, 1, 2, 3, 4], 1: [5]}
VOCAB = 50


def make_batch(rows):
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(12) < torch.tensor(LENGTHS)[:, None]
    batch = {
        "input_ids": torch.randint(0, VOCAB, mask.shape, generator=generator),
        "attention_mask": mask,
        "loss_mask": torch.rand(mask.shape, generator=generator) > 0.3,
    }
    return {name: tensor[rows] for name, tensor in batch.items()}


def fail_to_weigh(rank, world_size):
    """Let rank 0's weights raise; return what is raised here."""

    def weigh(microbatch):
        if rank == 0:
            raise ValueError("odd mask")
        return sft_loss_weight(microbatch)

    planned = split_into_microbatches(make_batch([0]), MicroBatchSpec())
    try:
        compute_total_loss_weight(planned, weigh, dist.group.WORLD)
    except (ValueError, ConfigError) as error:
        return repr(error)
    return ""


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(VOCAB, 16), nn.Linear(16, 16), nn.Tanh())


def run_microbatch(model, microbatch):
    hidden = model(microbatch.tokens["input_ids"])
    logprobs, _ = fused_logprobs(hidden, model[0].weight, microbatch.tokens["labels"])
    return sft_loss(LossInputs(torch.roll(logprobs, 1), None, microbatch)).loss


def reference():
    """One row at a time, the whole softmax, tokens one by one."""
    model = make_model()
    batch = make_batch(range(len(LENGTHS)))
    total, weight = torch.zeros(()), 0
    for row, length in enumerate(LENGTHS):
        ids = batch["input_ids"][row]
        logprobs = (model(ids) @ model[0].weight.t()).log_softmax(-1)
        for t in range(1, length):
            if batch["loss_mask"][row, t]:
                total = total - logprobs[t - 1, ids[t]]
                weight += 1
    loss = total / weight
    loss.backward()
    return loss.item(), weight, [parameter.grad for parameter in model.parameters()]


def train_on_own_rows(rank, world_size, algorithm):
    spec = MicroBatchSpec(max_tokens_per_mb=12, packing_algorithm=algorithm)
    batch = make_batch(ROWS_OF_RANK[rank])
    group = dist.group.WORLD
    own_count = len(split_into_microbatches(batch, spec))
    count = reduce_num_microbatches(own_count, group)
    planned = split_into_microbatches(batch, spec, pad_multiple=4, num_microbatches=count)
    total_weight = compute_total_loss_weight(planned, sft_loss_weight, group)
    model = make_model()
    losses, zeros = [], []
    for microbatch in planned:
        loss = run_microbatch(model, microbatch)
        gradients = torch.autograd.grad(loss / total_weight, list(model.parameters()))
        if microbatch.is_dummy:
            zeros.append(all(not gradient.any() for gradient in gradients))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        losses.append(loss)
    mean = aggregate_eval_losses(losses, total_weight, group)
    reference_loss, reference_weight, expected = reference()
    error = 0.0
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        dist.all_reduce(parameter.grad)
        error = max(error, ((parameter.grad - gradient).norm() / gradient.norm()).item())
    return {
        "own_count": own_count,
        "count": len(planned),
        "dummies": sum(microbatch.is_dummy for microbatch in planned),
        "dummy_gradients_are_zero": all(zeros) and len(zeros) > 0,
        "total_weight": total_weight.item(),
        "reference_weight": reference_weight,
        "loss": mean.item(),
        "reference_loss": reference_loss,
        "gradient_error": error,
    }


def compare_batches(rank: int, world_size: int, rows: int) -> dict[str, str]:
    """Compare batches of ranks {0, 1} and {2, 3}; the last rank alone changes its own."""
    index = rank // 2
    batch = {
        "input_ids": torch.full((rows, 4), index),
        "attention_mask": torch.ones(rows, 4, dtype=torch.bool),
        "reward": torch.ones(rows, dtype=torch.bfloat16),
    }
    changes = {
        "same": batch,
        "value": {**batch, "reward": batch["reward"] * 2},
        "shape": {**batch, "reward": batch["reward"][:, None]},
        "name": {**{k: v for k, v in batch.items() if k != "reward"}, "score": batch["reward"]},
    }
    said = {}
    for name, changed in changes.items():
        try:
            check_same_batch(changed if rank == 3 else batch, index, 2, dist.group.WORLD)
        except ConfigError as error:
            said[name] = str(error)
        else:
            said[name] = ""
    return said
