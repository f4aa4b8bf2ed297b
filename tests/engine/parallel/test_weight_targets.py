"""Rows of buckets land where they belong, in chunks too."""

from __future__ import annotations

import pytest
import torch

from fsdpbench.engine.parallel import weight_targets
from fsdpbench.engine.parallel.weight_buckets import Span, plan_buckets
from fsdpbench.engine.parallel.weight_targets import ShardTarget, TiedCopyTarget, place_bucket

WHOLE = torch.arange(28.0).view(7, 4)


def send(tensor, target, bucket_bytes=40):
    rows = slice(0, tensor.shape[0] if tensor.ndim else 1)
    span = Span("a", tensor.dtype, tuple(tensor.shape) or (1,), rows)
    for bucket in plan_buckets([span], bucket_bytes):
        memory = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        for piece in bucket.pieces:
            flat = tensor.view(-1).view(torch.uint8)
            start = piece.source_offset_bytes
            memory[piece.bucket_offset_bytes :][: piece.num_bytes] = flat[start:][: piece.num_bytes]
        place_bucket(bucket, memory, {"a": target})


@pytest.mark.parametrize(
    "region", [(slice(0, 7), slice(0, 4)), (slice(2, 5), slice(1, 3)), (slice(7, 7), slice(0, 4))]
)
def test_a_shard_takes_its_rows_and_columns_and_casts(region):
    target = ShardTarget(torch.zeros(7, 4))
    target.region, target.shard = region, torch.full_like(WHOLE[region], torch.nan)
    send(WHOLE.bfloat16(), target)
    assert torch.equal(target.shard, WHOLE[region])


def test_a_number_is_one_row():
    target = ShardTarget(torch.tensor(0.0))
    send(torch.tensor(3.0), target)
    assert target.shard == 3.0


@pytest.mark.parametrize("chunk_bytes", [1, 32, 1 << 20])
def test_a_tied_copy_is_compared_row_by_row(chunk_bytes, monkeypatch):
    monkeypatch.setattr(weight_targets, "CHUNK_BYTES", chunk_bytes)
    same, other = TiedCopyTarget(WHOLE.clone()), TiedCopyTarget(WHOLE.clone())
    send(WHOLE.bfloat16(), same)
    assert not same.differs
    changed = WHOLE.clone()
    changed[6, 3] += 1
    send(changed, other)
    assert other.differs
    assert torch.equal(other.shard, WHOLE)


@pytest.mark.gpu
def test_from_the_device_to_the_host_and_back(monkeypatch):
    monkeypatch.setattr(weight_targets, "CHUNK_BYTES", 32)
    for there, here in (("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")):
        target = ShardTarget(torch.zeros(7, 4, device=here))
        span = Span("a", torch.bfloat16, (7, 4), slice(0, 7))
        (bucket,) = plan_buckets([span])
        memory = WHOLE.bfloat16().view(-1).view(torch.uint8).to(there)
        place_bucket(bucket, memory, {"a": target})
        assert torch.equal(target.shard.cpu(), WHOLE)
