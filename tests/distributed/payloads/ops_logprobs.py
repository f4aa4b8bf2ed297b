"""Vocabulary-parallel log-probabilities against whole logits in float64."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fsdpbench.engine.ops.logprobs import fused_logprobs, gather_logprobs_entropy
from tests.engine.ops.test_logprobs import (
    VOCAB,
    make_inputs,
    reference,
    relative_error,
    weighted_sum,
)


def compare_shards(rank, world_size, cases):
    hidden, weight, labels = make_inputs()
    rows = VOCAB // world_size
    shard = weight.detach()[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    errors = {}
    for case, options in cases.items():
        values = fused_logprobs(
            hidden,
            shard,
            labels,
            chunk_size=16,
            tp_group=dist.group.WORLD,
            vocab_start=rank * rows,
            **options,
        )
        expected = reference(
            hidden, weight, labels, options.get("temperature", 1.0), options.get("logit_softcap")
        )
        expected = expected[: 2 if options.get("with_entropy") else 1]
        grad_hidden, grad_shard = torch.autograd.grad(weighted_sum(values), [hidden, shard])
        dist.all_reduce(grad_hidden)
        wanted = torch.autograd.grad(weighted_sum(expected), [hidden, weight])
        errors[case] = {
            "logprobs": relative_error(values[0], expected[0]),
            "entropy": relative_error(values[1], expected[1]) if len(expected) > 1 else 0.0,
            "hidden": relative_error(grad_hidden, wanted[0]),
            "weight": relative_error(grad_shard, wanted[1][rank * rows : (rank + 1) * rows]),
            "differs from rank 0": distance_to_rank_0(values[0].detach()),
        }
    errors["gathered"] = compare_gathered(rank, rows, hidden, weight, labels)
    return errors


def compare_gathered(rank, rows, hidden, weight, labels):
    logits = (hidden.detach() @ weight.detach().t()).requires_grad_()
    own = logits.detach()[:, rank * rows : (rank + 1) * rows].clone().requires_grad_()
    values = gather_logprobs_entropy(own, labels, 0.7, dist.group.WORLD, chunk_size=16)
    leaf = logits.detach().double().requires_grad_()
    expected = reference(leaf, torch.eye(VOCAB, dtype=torch.float64), labels, 0.7)
    (gradient,) = torch.autograd.grad(weighted_sum(values), own)
    (wanted,) = torch.autograd.grad(weighted_sum(expected), leaf)
    return {
        "logprobs": relative_error(values[0], expected[0]),
        "entropy": relative_error(values[1], expected[1]),
        "logits": relative_error(gradient, wanted[:, rank * rows : (rank + 1) * rows]),
    }


def distance_to_rank_0(values):
    first = values.clone()
    dist.broadcast(first, 0)
    return (first - values).abs().max().item()
