"""Buckets are cut by bytes, stages by layers; all of it arithmetic."""

from __future__ import annotations

from itertools import pairwise

import pytest

from fsdpbench.engine.weight_sync.buckets import (
    StageMap,
    last_but_one_first,
    last_first,
    plan_buckets,
    plan_update,
    rename,
    split_stages,
)
from fsdpbench.engine.weight_sync.records import TensorSpec
from fsdpbench.errors import WeightSyncError


def spec(name, num_items):
    return TensorSpec(name, (num_items,), "bfloat16")


def names(bucket):
    return [one.name for one in bucket.specs]


def test_buckets_keep_the_order_and_the_limit():
    specs = [spec(str(index), 8 * (1 + index % 3)) for index in range(20)]
    buckets = plan_buckets(specs, 100)
    assert [name for bucket in buckets for name in names(bucket)] == [one.name for one in specs]
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    assert all(bucket.num_bytes <= 100 for bucket in buckets)
    for bucket, later in pairwise(buckets):  # none could take one more
        assert bucket.num_bytes + 16 * -(-later.specs[0].num_bytes // 16) > 100


def test_a_tensor_larger_than_a_bucket_has_its_own():
    buckets = plan_buckets([spec("a", 8), spec("large", 1000), spec("b", 8)], 64)
    assert [names(bucket) for bucket in buckets] == [["a"], ["large"], ["b"]]


def test_alignment_counts():
    assert len(plan_buckets([spec("a", 1), spec("b", 1)], 31)) == 2
    assert len(plan_buckets([spec("a", 1), spec("b", 1)], 32)) == 1


def test_a_name_travels_once_and_nothing_makes_no_bucket():
    assert names(plan_buckets([spec("a", 1), spec("b", 1), spec("a", 1)], 100)[0]) == ["a", "b"]
    assert plan_buckets([], 100) == ()
    assert not plan_buckets([spec("a", 1)], 100, packed=False)[0].packed


@pytest.mark.parametrize(
    ("num_layers", "size", "vllm", "sglang"),
    [
        (4, 1, (4,), (4,)),
        (8, 2, (4, 4), (4, 4)),
        (9, 2, (5, 4), (4, 5)),
        (10, 4, (2, 3, 3, 2), (2, 2, 3, 3)),
        (11, 4, (3, 3, 3, 2), (2, 3, 3, 3)),
    ],
)
def test_layers_are_divided_as_the_servers_do(num_layers, size, vllm, sglang):
    assert last_but_one_first(num_layers, size) == vllm
    assert last_first(num_layers, size) == sglang


MODEL = (
    [spec("model.embed_tokens.weight", 9)]
    + [spec(f"model.layers.{index}.{leaf}", 4) for index in range(3) for leaf in ("q", "o")]
    + [spec("model.norm.weight", 2)]
)


@pytest.mark.parametrize("is_tied", [False, True])
def test_stages_hold_their_layers_and_the_ends(is_tied):
    head = [] if is_tied else [spec("lm_head.weight", 9)]
    first, last = split_stages(MODEL + head, StageMap(3, 2, "vllm", is_tied))
    assert [one.name for one in first] == [one.name for one in MODEL[:5]]
    expected = {"model.layers.2.q", "model.layers.2.o", "model.norm.weight"}
    expected.add("model.embed_tokens.weight" if is_tied else "lm_head.weight")
    assert {one.name for one in last} == expected


def test_adapters_belong_to_the_stage_of_their_layer():
    stages = StageMap(4, 2, "sglang")
    assert stages("base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight") == (0,)
    assert stages("base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight") == (1,)


@pytest.mark.parametrize("size", [0, 4])
def test_more_stages_than_layers_are_refused(size):
    with pytest.raises(WeightSyncError, match=r"a model of 3 layers has 1\.\.3 stages"):
        StageMap(3, size)


def test_an_update_is_planned_in_the_order_of_the_walk():
    plan = plan_update(MODEL, 1000, stages_of=StageMap(3, 2, "vllm", is_tied=True))
    assert [(item.stage, names(item.bucket)[0]) for item in plan] == [
        (0, "model.embed_tokens.weight"),
        (1, "model.embed_tokens.weight"),
        (0, "model.layers.0.q"),
        (1, "model.layers.2.q"),
    ]
    assert [item.bucket.index for item in plan] == [0, 1, 2, 3]


def test_renaming_changes_names_alone():
    bucket = plan_buckets(MODEL, 1000)[0]
    renamed = rename(bucket, str.upper)
    assert names(renamed) == [name.upper() for name in names(bucket)]
    assert (renamed.num_bytes, renamed.offsets) == (bucket.num_bytes, bucket.offsets)
