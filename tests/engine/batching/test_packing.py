"""Packing against a loop over tokens; refusals name the tensor and the rows."""

from __future__ import annotations

import itertools

import pytest
import torch

from fsdpbench.engine.batching.packing import check_token_ids, pack, read_lengths
from fsdpbench.errors import ConfigError


def make_batch(lengths, width=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    width = width or max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    rows = len(lengths)
    return {
        "input_ids": torch.randint(1, 90, (rows, width), generator=generator) * mask,
        "attention_mask": mask,
        "loss_mask": torch.randint(0, 2, (rows, width), generator=generator).float() * mask,
        "features": torch.randn(rows, width, 3, generator=generator),
        "reward": torch.randn(rows, generator=generator),
        "pair": torch.randn(rows, width + 1, generator=generator),
    }


@pytest.mark.parametrize("rows", [[0], [2, 0], [3, 1, 0, 2], [1, 1]])
@pytest.mark.parametrize("pad_multiple", [1, 4])
@pytest.mark.parametrize("pad_to", [0, 3, 29])
def test_equals_a_loop_over_tokens(rows, pad_multiple, pad_to):
    lengths = [5, 1, 9, 3]
    batch = make_batch(lengths)
    packed = pack(batch, rows, pad_multiple, pad_to)
    ids, labels, positions, loss_mask, features, bounds = [], [], [], [], [], [0]
    for row in rows:
        for t in range(lengths[row]):
            ids.append(batch["input_ids"][row, t].item())
            last = t == lengths[row] - 1
            labels.append(-100 if last else batch["input_ids"][row, t + 1].item())
            positions.append(t)
            loss_mask.append(batch["loss_mask"][row, t].item())
            features.append(batch["features"][row, t].tolist())
        bounds.append(len(ids))
    num_real = len(ids)
    place = 0
    while len(ids) < pad_to or len(ids) % pad_multiple:
        ids.append(0)
        labels.append(-100)
        positions.append(place)
        loss_mask.append(0.0)
        features.append([0.0] * 3)
        place += 1
    if place:
        bounds.append(len(ids))
    assert packed.tokens["input_ids"].tolist() == ids
    assert packed.tokens["labels"].tolist() == labels
    assert packed.tokens["position_ids"].tolist() == positions
    assert packed.tokens["loss_mask"].tolist() == loss_mask
    assert torch.equal(packed.tokens["features"], torch.tensor(features))
    assert packed.cu_seqlens.tolist() == bounds
    assert packed.cu_seqlens.dtype == torch.int32
    assert torch.equal(packed.per_sequence["reward"], batch["reward"][rows])
    assert torch.equal(packed.per_sequence["pair"], batch["pair"][rows])
    assert set(packed.tokens) == {"input_ids", "labels", "position_ids", "loss_mask", "features"}
    assert packed.sequence_lengths == tuple(lengths[row] for row in rows)
    assert packed.sequence_indices == tuple(rows)
    assert (packed.num_tokens, packed.num_real_tokens) == (len(ids), num_real)
    assert packed.max_seqlen == max(b - a for a, b in itertools.pairwise(bounds))


def test_no_padding_without_need():
    packed = pack(make_batch([5, 3]), [0, 1], pad_multiple=4)
    assert packed.num_tokens == packed.num_real_tokens == 8
    assert packed.cu_seqlens.tolist() == [0, 5, 8]


@pytest.mark.parametrize(("pad_multiple", "pad_to", "expected"), [(1, 0, 1), (8, 0, 8), (4, 9, 12)])
def test_no_rows_make_a_dummy(pad_multiple, pad_to, expected):
    packed = pack(make_batch([5, 3]), [], pad_multiple, pad_to)
    assert packed.is_dummy
    assert packed.num_tokens == expected
    assert packed.num_real_tokens == 0
    assert packed.cu_seqlens.tolist() == [0, expected]
    assert packed.sequence_lengths == ()
    assert packed.tokens["labels"].tolist() == [-100] * expected
    assert not packed.tokens["loss_mask"].any()
    assert packed.per_sequence["reward"].shape == (0,)


def test_reads_lengths_of_int_masks():
    batch = make_batch([5, 1, 9])
    batch["attention_mask"] = batch["attention_mask"].long()
    assert read_lengths(batch) == [5, 1, 9]
    assert pack(batch, [0, 1]).sequence_lengths == (5, 1)


def refuse(change, *texts):
    batch = make_batch([5, 1, 9])
    change(batch)
    with pytest.raises(ConfigError) as caught:
        read_lengths(batch)
    for text in texts:
        assert text in str(caught.value)
    return caught.value.violations


def test_refuses_missing_tensors():
    refuse(lambda batch: batch.pop("attention_mask"), "batch.attention_mask=missing")


def test_refuses_other_shapes_all_at_once():
    def change(batch):
        batch["attention_mask"] = batch["attention_mask"][:, :4]
        batch["reward"] = torch.zeros(2)
        batch["scale"] = torch.tensor(1.0)
        batch["labels"] = batch["input_ids"]

    violations = refuse(change, "must be [3, 9]", "must have 3 rows", "packing derives it")
    assert [violation.where for violation in violations] == [
        "batch.attention_mask",
        "batch.reward",
        "batch.scale",
        "batch.labels",
    ]


def test_refuses_flat_ids():
    refuse(lambda batch: batch.update(input_ids=torch.zeros(3)), "batch.input_ids=[3]")


def test_refuses_device_tensors():
    refuse(
        lambda batch: batch.update(reward=torch.zeros(3, device="meta")),
        "batch.reward=meta: must be on the CPU",
    )


def test_refuses_empty_and_left_padded_rows():
    def change(batch):
        batch["attention_mask"][1] = False
        batch["attention_mask"][2, 0] = False

    refuse(change, "attention_mask[rows 1]=no real token", "attention_mask[rows 2]=padding before")


@pytest.mark.parametrize("wrong", [-1, 100])
def test_ids_outside_the_vocabulary_are_refused_unless_they_are_padding(wrong):
    batch = make_batch([3, 5], width=5)
    check_token_ids(batch, 100)
    batch["input_ids"][0, 4] = wrong
    check_token_ids(batch, 100)
    batch["input_ids"][1, 4] = wrong
    with pytest.raises(ConfigError, match=rf"batch.input_ids\[1, 4\]={wrong}: must lie in 0..99"):
        check_token_ids(batch, 100)
