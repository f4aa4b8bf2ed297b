"""The supervised objective: negative log-likelihood of the tokens that the batch asks for. Pure.

`loss_mask` [T], if the batch has one, weights token t; without it every token that has a
predecessor in its sequence counts 1. First tokens have no prediction: they never count, whatever
their mask.
"""

from __future__ import annotations

import torch

from fsdpbench.engine.batching.containers import PackedMicroBatch
from fsdpbench.engine.protocols import LossInputs, LossOutputs


def weigh_tokens(microbatch: PackedMicroBatch) -> torch.Tensor:
    """Return the weight of each token's prediction: [T] fp32, 0 at first tokens and padding."""
    weights = microbatch.predicted.float()
    if "loss_mask" in microbatch.tokens:
        weights *= microbatch.tokens["loss_mask"]
    return weights


def sft_loss_weight(microbatch: PackedMicroBatch) -> torch.Tensor:
    """Return the sum of the token weights (0-D float64), by which `sft_loss` is to be divided."""
    return weigh_tokens(microbatch).sum(dtype=torch.float64)


def sft_loss(inputs: LossInputs) -> LossOutputs:
    """Return the weighted sum of negative log-likelihoods."""
    weights = weigh_tokens(inputs.microbatch)
    loss = -(inputs.logprobs * weights).sum()
    stats = {}
    if inputs.entropy is not None:
        stats["entropy"] = (inputs.entropy.detach() * weights).sum()
    return LossOutputs(loss=loss, stats=stats)
