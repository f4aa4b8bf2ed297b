"""Bytes of buckets arrive whole, in order, and failures where their bucket is due."""

from __future__ import annotations

import threading

import pytest
import torch

from fsdpbench.engine.device import Device
from fsdpbench.engine.parallel.bucket_reader import BucketReader, FileSource, MemorySource
from fsdpbench.engine.parallel.weight_buckets import Span, plan_buckets
from fsdpbench.errors import CheckpointError

CPU = Device("cpu")
CONTENT = bytes(range(256)) * 40


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(CONTENT)
    return path


def plan_file(file, num_bytes=10_240):
    count = num_bytes // 2
    return plan_buckets([Span("a", torch.float16, (count,), slice(0, count), str(file))], 1000)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_files_arrive_in_order(file, num_stages):
    buckets = plan_file(file)
    arrived = b""
    with BucketReader(buckets, FileSource(chunk_bytes=64), CPU, num_stages=num_stages) as reader:
        assert len(reader.stages) == num_stages
        for bucket, stage in reader:
            arrived += bytes(stage.memory[: bucket.num_bytes].tolist())
    assert arrived == CONTENT
    assert reader.stages == []


def test_fewer_buckets_than_stages_need_less_memory(file):
    with BucketReader(plan_file(file, 500), FileSource(), CPU) as reader:
        assert [stage.memory.numel() for stage in reader.stages] == [500]
    with BucketReader([], FileSource(), CPU) as reader:
        assert list(reader) == []


def test_a_file_that_shrinks_fails_at_its_bucket(file):
    buckets = plan_file(file)
    file.write_bytes(CONTENT[:2500])
    seen = []
    with (
        pytest.raises(CheckpointError, match=r"weights cannot be read: it ends at byte 2500"),
        BucketReader(buckets, FileSource(), CPU) as reader,
    ):
        seen.extend(bucket for bucket, _ in reader)
    assert seen == buckets[:2]


def test_a_file_that_is_gone_is_named(file, tmp_path):
    buckets = plan_file(file)
    file.unlink()
    with (
        pytest.raises(CheckpointError, match="weights cannot be read"),
        BucketReader(buckets, FileSource(), CPU) as reader,
    ):
        next(iter(reader))


def test_threads_end_with_the_block_even_when_the_caller_stops_early(file):
    with BucketReader(plan_file(file), FileSource(), CPU) as reader:
        next(iter(reader))
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("bucket-reader")]


def test_tensors_at_hand_are_copied_whatever_their_layout():
    tensors = {"a": torch.arange(12.0).view(3, 4).t(), "b": torch.tensor(2.0)}
    spans = [
        Span("a", torch.float32, (4, 3), slice(1, 4)),
        Span("b", torch.float32, (1,), slice(0, 1)),
    ]
    found = {}
    with BucketReader(plan_buckets(spans, 24), MemorySource(tensors), CPU) as reader:
        for bucket, stage in reader:
            for piece in bucket.pieces:
                found.setdefault(piece.name, []).append(piece.view_in(stage.memory).clone())
    assert torch.equal(torch.cat(found["a"]), tensors["a"][1:])
    assert torch.cat(found["b"]).tolist() == [2.0]


@pytest.mark.gpu
def test_stages_are_page_locked_and_not_refilled_before_their_copies_end(file):
    device = Device("cuda", 0)
    landed = []
    with BucketReader(plan_file(file), FileSource(), device, num_stages=2) as reader:
        assert all(stage.memory.is_pinned() for stage in reader.stages)
        for bucket, stage in reader:
            there = stage.memory[: bucket.num_bytes].to("cuda", non_blocking=True)
            stage.mark_copies_enqueued()
            landed.append(there)
    assert bytes(torch.cat(landed).tolist()) == CONTENT
