"""Digests notice what happens to weights on their way."""

from __future__ import annotations

import pytest
import torch

from fsdpbench.engine.weight_sync.digests import (
    ROW_WORDS,
    compare_digests,
    compute_digest,
    compute_digests,
    sum_words,
)
from fsdpbench.errors import WeightSyncError


def reference(tensor):
    words = tensor.contiguous().view(-1).view(torch.int16).tolist()
    total = rows = columns = 0
    for index, word in enumerate(words):
        total += word
        rows += word * (index // ROW_WORDS + 1)
        columns += word * (index % ROW_WORDS + 1)
    return [total, rows, columns]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (ROW_WORDS,), (70, 150), (300, 1000)])
def test_sums_equal_a_loop_over_words(dtype, shape):
    tensor = torch.randn(shape).to(dtype)
    assert sum_words(tensor).tolist() == reference(tensor)


def changed(tensor, how):
    flat = tensor.clone().view(-1)
    if how == "one bit":
        flat.view(torch.int16)[7] ^= 1
    elif how == "exchanged neighbours":
        flat[10:12] = flat[10:12].flip(0)
    elif how == "exchanged rows":
        first, second = flat[:ROW_WORDS].clone(), flat[ROW_WORDS : 2 * ROW_WORDS].clone()
        flat[:ROW_WORDS], flat[ROW_WORDS : 2 * ROW_WORDS] = second, first
    elif how == "shifted":
        flat.copy_(flat.roll(1))
    elif how == "two signs":
        flat[3].neg_()
        flat[5].neg_()
    elif how == "end lost":
        flat[-100:] = 0
    return flat.view(tensor.shape)


@pytest.mark.parametrize(
    "how",
    ["one bit", "exchanged neighbours", "exchanged rows", "shifted", "two signs", "end lost"],
)
def test_every_accident_changes_the_digest(how):
    tensor = torch.randn(200, 100, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert compute_digest(changed(tensor, how)) != compute_digest(tensor)
    assert compute_digest(changed(tensor, "nothing")) == compute_digest(tensor)


def test_shape_and_dtype_belong_to_the_digest():
    zeros = torch.zeros(4, 6)
    assert compute_digest(zeros).startswith("float32[4, 6]:")
    assert len({compute_digest(t) for t in (zeros, zeros.view(6, 4), zeros.bfloat16())}) == 3


def test_views_that_are_not_contiguous_count_as_their_values():
    tensor = torch.randn(40, 30)
    assert compute_digest(tensor.t()) == compute_digest(tensor.t().clone())
    assert compute_digest(tensor.bfloat16()[:, 1:]) == compute_digest(tensor[:, 1:].bfloat16())


def test_differences_are_named_at_most_five():
    sent = {f"w{i}": "float32[4]:a" for i in range(9)}
    arrived = {
        **{f"w{i}": "float32[4]:b" for i in range(6)},
        "w6": "bfloat16[4]:a",
        "w7": sent["w7"],
        "extra": "float32[4]:a",
    }
    with pytest.raises(WeightSyncError) as caught:
        compare_digests(sent, arrived, "receiver 1")
    text = str(caught.value)
    assert "missing there: w8" in text
    assert "never sent: extra" in text
    assert "other values: w0, w1, w2, w3, w4 and 1 more" in text
    assert "other shape or dtype: w6 (w6 is float32[4] here and bfloat16[4] there; " in text
    compare_digests(sent, dict(sent), "receiver 1")


@pytest.mark.gpu
def test_devices_agree():
    tensor = torch.randn(5000, 4000).bfloat16()
    here = compute_digests([("a", tensor)])
    there = compute_digests([("a", tensor.cuda())])
    assert here == there
