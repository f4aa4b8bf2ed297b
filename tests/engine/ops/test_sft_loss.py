"""The supervised loss against a loop over tokens."""

from __future__ import annotations

import pytest
import torch

from fsdpbench.engine.batching.packing import pack
from fsdpbench.engine.ops.sft_loss import sft_loss, sft_loss_weight, weigh_tokens
from fsdpbench.engine.protocols import LossInputs

LENGTHS = [4, 1, 3]


def make_microbatch(loss_mask=None, rows=(0, 1, 2)):
    mask = torch.arange(4) < torch.tensor(LENGTHS)[:, None]
    batch = {"input_ids": torch.ones_like(mask, dtype=torch.long), "attention_mask": mask}
    if loss_mask is not None:
        batch["loss_mask"] = torch.tensor(loss_mask)
    return pack(batch, rows, pad_multiple=10)


MASKS = {
    "none": None,
    "bool": [[True, False, True, True], [True] * 4, [True, True, False, True]],
    "float": [[1.0, 0.5, 0.0, 2.0], [3.0, 0.0, 0.0, 0.0], [7.0, 0.25, 1.0, 0.0]],
}


@pytest.mark.parametrize("kind", MASKS)
def test_equals_a_loop_over_tokens(kind):
    loss_mask = MASKS[kind]
    microbatch = make_microbatch(loss_mask)
    logprobs = -torch.rand(microbatch.num_tokens, generator=torch.Generator().manual_seed(0))
    expected, weight, place = 0.0, 0.0, 0
    for row, length in enumerate(LENGTHS):
        for t in range(length):
            counts = 0.0 if t == 0 else 1.0 if loss_mask is None else float(loss_mask[row][t])
            expected -= counts * logprobs[place].item()
            weight += counts
            place += 1
    outputs = sft_loss(LossInputs(logprobs, None, microbatch))
    assert outputs.loss.item() == pytest.approx(expected, rel=1e-6)
    assert sft_loss_weight(microbatch).item() == weight
    assert sft_loss_weight(microbatch).dtype == torch.float64
    assert outputs.stats == {}


def test_dummies_have_no_weight_and_no_loss():
    microbatch = make_microbatch(rows=())
    assert not weigh_tokens(microbatch).any()
    logprobs = torch.zeros(microbatch.num_tokens, requires_grad=True)
    loss = sft_loss(LossInputs(logprobs, None, microbatch)).loss
    loss.backward()
    assert loss.item() == 0.0
    assert not logprobs.grad.any()


def test_entropy_is_reported_without_gradient():
    microbatch = make_microbatch()
    entropy = torch.arange(10.0, requires_grad=True)
    outputs = sft_loss(LossInputs(torch.zeros(10), entropy, microbatch))
    assert outputs.stats["entropy"].item() == 1 + 2 + 3 + 6 + 7
    assert not outputs.stats["entropy"].requires_grad
