"""Micro-batches: round trips over random lengths, equal counts over ranks, weights and dummies."""

from __future__ import annotations

import random

import pytest
import torch

from fsdpbench.engine.batching.microbatch import (
    aggregate_eval_losses,
    compute_total_loss_weight,
    plan_microbatches,
    reduce_num_microbatches,
    reorder_and_pad_outputs,
    split_into_microbatches,
)
from fsdpbench.engine.config.batching import MicroBatchSpec
from fsdpbench.engine.ops.sft_loss import sft_loss_weight
from fsdpbench.errors import ConfigError
from tests.distributed.pool import run_on_ranks


def make_batch(lengths, width=None):
    width = width or max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = torch.arange(1, len(lengths) * width + 1).view(len(lengths), width) * mask
    return {"input_ids": ids, "attention_mask": mask, "rows": torch.arange(len(lengths))}


@pytest.mark.parametrize("algorithm", ["ffd", "kk"])
def test_round_trip_over_random_lengths(algorithm):
    rng = random.Random(11)
    for _ in range(40):
        lengths = [rng.choice([1, rng.randint(1, 40)]) for _ in range(2 * rng.randint(1, 8))]
        batch = make_batch(lengths, width=40 + rng.randint(0, 3))
        spec = MicroBatchSpec(
            n_mbs=rng.randint(1, 4),
            granularity=rng.choice([1, 2]),
            max_tokens_per_mb=rng.choice([None, 80, 200]),
            n_mbs_divisor=rng.choice([1, 2]),
            packing_algorithm=algorithm,
        )
        planned = split_into_microbatches(
            batch,
            spec,
            pad_multiple=rng.choice([1, 4]),
            pad_to_maximum=rng.choice([False, True]),
            num_microbatches=rng.choice([None, 2 * len(lengths)]),
        )
        outputs = [mb.tokens["input_ids"] for mb in planned]
        assert torch.equal(reorder_and_pad_outputs(outputs, planned), batch["input_ids"])
        two = [torch.stack([ids, -ids], dim=1).float() for ids in outputs]
        rows = reorder_and_pad_outputs(two, planned)
        assert torch.equal(rows[..., 1], -batch["input_ids"].float())
        for mb in planned:
            assert mb.per_sequence["rows"].tolist() == list(mb.sequence_indices)


def test_outputs_with_one_value_per_sequence():
    batch = make_batch([3, 9, 1, 4])
    planned = split_into_microbatches(batch, MicroBatchSpec(max_tokens_per_mb=9), pad_multiple=8)
    assert len(planned) > 1
    outputs = [mb.per_sequence["rows"] * 10 for mb in planned]
    assert reorder_and_pad_outputs(outputs, planned, [1] * 4).tolist() == [[0], [10], [20], [30]]


def test_outputs_go_through_aggregate_fn_without_padding():
    planned = split_into_microbatches(make_batch([3, 2]), MicroBatchSpec(n_mbs=2), pad_multiple=4)
    seen = []

    def join(parts):
        seen.extend(len(part) for part in parts)
        return torch.cat(parts) * 2

    rows = reorder_and_pad_outputs([mb.tokens["input_ids"] for mb in planned], planned, None, join)
    assert seen == [3, 2]
    assert rows.tolist() == [[2, 4, 6], [8, 10, 0]]


def test_rows_keep_the_outputs_type():
    planned = split_into_microbatches(make_batch([3, 2]), MicroBatchSpec(n_mbs=2))
    outputs = [torch.ones(mb.num_tokens, dtype=torch.bfloat16) for mb in planned]
    assert reorder_and_pad_outputs(outputs, planned).dtype == torch.bfloat16


@pytest.mark.parametrize("algorithm", ["ffd", "kk"])
def test_a_given_count_is_met_with_dummies_at_the_end(algorithm):
    batch = make_batch([5, 3, 8])
    spec = MicroBatchSpec(max_tokens_per_mb=8, packing_algorithm=algorithm)
    planned = split_into_microbatches(batch, spec, pad_multiple=4, num_microbatches=5)
    assert [mb.is_dummy for mb in planned] == [False, False, False, True, True]
    assert [mb.num_tokens for mb in planned] == [8, 8, 4, 4, 4]
    assert [float(sft_loss_weight(mb)) for mb in planned] == [7.0, 4.0, 2.0, 0.0, 0.0]


def test_a_count_below_the_ranks_need_is_refused():
    spec = MicroBatchSpec(max_tokens_per_mb=8)
    with pytest.raises(ConfigError, match="num_microbatches=1: this rank needs at least 2"):
        split_into_microbatches(make_batch([8, 8]), spec, num_microbatches=1)


def test_n_mbs_alone_makes_that_many():
    groups = plan_microbatches([4, 4, 4, 4, 4, 4], MicroBatchSpec(n_mbs=3))
    assert sorted(len(group) for group in groups) == [2, 2, 2]


def test_a_sequence_above_the_cap_is_named():
    with pytest.raises(ConfigError, match=r"mb_spec\.max_tokens_per_mb=4: sequence 1 of 6 tokens"):
        split_into_microbatches(make_batch([2, 6]), MicroBatchSpec(max_tokens_per_mb=4))


def test_pad_to_maximum_takes_the_cap_or_the_longest():
    batch = make_batch([5, 3, 6])
    capped = split_into_microbatches(
        batch, MicroBatchSpec(max_tokens_per_mb=10), pad_multiple=4, pad_to_maximum=True
    )
    assert {mb.num_tokens for mb in capped} == {12}
    free = split_into_microbatches(batch, MicroBatchSpec(n_mbs=2), pad_to_maximum=True)
    assert {mb.num_tokens for mb in free} == {8}
    assert free.num_real_tokens == 14


def test_packing_wastes_nothing():
    planned = split_into_microbatches(make_batch([5, 3, 6, 1]), MicroBatchSpec(max_tokens_per_mb=9))
    assert planned.num_tokens == planned.num_real_tokens == 15


def test_total_weight_sums_and_refuses_nothing_to_learn():
    planned = split_into_microbatches(make_batch([5, 3]), MicroBatchSpec(n_mbs=2))
    total = compute_total_loss_weight(planned, sft_loss_weight)
    assert (total.item(), total.dtype, total.device.type) == (6.0, torch.float64, "cpu")
    silent = split_into_microbatches(make_batch([1, 1]), MicroBatchSpec())
    with pytest.raises(ConfigError, match=r"loss_weight_fn=0\.0 in all: .*more than 0"):
        compute_total_loss_weight(silent, sft_loss_weight)


def test_a_weight_function_that_fails_on_one_rank_stops_its_peers():
    path = "tests.distributed.payloads.ops_microbatches:fail_to_weigh"
    failing, peer = run_on_ranks(path, 2, timeout_seconds=60)
    assert failing == "ValueError('odd mask')"
    assert "nan in all" in peer
    assert "errors of other ranks" in peer


def test_eval_losses_add_up_to_a_mean():
    losses = [torch.tensor(3.0, requires_grad=True), torch.tensor(5.0)]
    mean = aggregate_eval_losses(losses, torch.tensor(4.0, dtype=torch.float64))
    assert mean.item() == 2.0
    assert not mean.requires_grad
    rows = [torch.tensor([1.0, 10.0]), torch.tensor([3.0, 30.0])]
    assert aggregate_eval_losses(rows, 2.0).tolist() == [2.0, 20.0]


def test_one_rank_alone_needs_no_group():
    assert reduce_num_microbatches(3, None) == 3


@pytest.mark.parametrize("algorithm", ["ffd", "kk"])
def test_ranks_of_unequal_batches_match_one_process(algorithm):
    """Two ranks with 5 and 1 sequences: equal counts, and the gradient of all six in one row."""
    results = run_on_ranks(
        "tests.distributed.payloads.ops_microbatches:train_on_own_rows", 2, algorithm=algorithm
    )
    count = max(result["own_count"] for result in results)
    assert [result["count"] for result in results] == [count, count]
    assert [result["dummies"] for result in results] == [0, count - 1]
    assert results[1]["dummy_gradients_are_zero"]
    for result in results:
        assert result["total_weight"] == result["reference_weight"]
        assert result["loss"] == pytest.approx(result["reference_loss"], rel=1e-6)
        assert result["gradient_error"] < 1e-6


@pytest.mark.parametrize("rows", [0, 3])
def test_ranks_of_one_index_must_pass_the_same_batch(rows):
    """Ranks 0 and 1 share data, ranks 2 and 3 do; what differs is a value, a shape or a name."""
    said = run_on_ranks("tests.distributed.payloads.ops_microbatches:compare_batches", 4, rows=rows)
    for answers in said:
        assert answers["same"] == ""
        for name in ("value", "shape", "name"):
            if rows or name != "value":
                assert "index 1: pass the same" in answers[name].replace("; ", ": ")
