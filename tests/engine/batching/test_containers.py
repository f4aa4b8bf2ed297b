"""Derived figures of packed micro-batches."""

from __future__ import annotations

import torch

from fsdpbench.engine.batching.containers import MicroBatchList
from fsdpbench.engine.batching.packing import pack

LENGTHS = [4, 1, 3]


def make_batch():
    mask = torch.arange(4) < torch.tensor(LENGTHS)[:, None]
    return {
        "input_ids": torch.arange(1, 13).view(3, 4) * mask,
        "attention_mask": mask,
        "reward": torch.tensor([0.5, 1.0, 2.0]),
    }


def test_predicted_marks_every_token_with_a_predecessor():
    packed = pack(make_batch(), [1, 0, 2], pad_multiple=6)
    assert packed.predicted.tolist() == [
        *[False],
        *[False, True, True, True],
        *[False, True, True],
        *[False] * 4,
    ]


def test_predicted_of_a_full_row_does_not_wrap_around():
    packed = pack(make_batch(), [0])
    assert packed.predicted.tolist() == [False, True, True, True]


def test_segment_lengths_count_the_padding_sequence():
    assert pack(make_batch(), [0, 1]).segment_lengths == (4, 1)
    padded = pack(make_batch(), [0, 1], pad_multiple=8)
    assert padded.segment_lengths == (4, 1, 3)
    assert padded.num_padding_tokens == 3
    assert pack(make_batch(), [], pad_multiple=8).segment_lengths == (8,)


def test_to_moves_every_tensor_and_nothing_else():
    packed = pack(make_batch(), [0, 2])
    moved = packed.to("meta")
    tensors = [*moved.tokens.values(), *moved.per_sequence.values(), moved.cu_seqlens]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.sequence_lengths == packed.sequence_lengths
    assert packed.cu_seqlens.device.type == "cpu"


def test_map_tensors_gives_each_tensor_to_the_mover_once():
    seen = []
    packed = pack(make_batch(), [0])
    packed.map_tensors(lambda tensor: seen.append(tensor) or tensor)
    assert len(seen) == len(packed.tokens) + len(packed.per_sequence) + 1


def test_a_list_counts_rows_and_tokens():
    batch = make_batch()
    groups = [[0], [1, 2], []]
    packed = MicroBatchList(tuple(pack(batch, rows, pad_multiple=6) for rows in groups), 3, 4)
    assert packed.row_lengths == LENGTHS
    assert packed.num_real_tokens == 8
    assert packed.num_tokens == 18
    assert len(packed) == len(list(packed)) == 3
    assert packed[2].is_dummy
