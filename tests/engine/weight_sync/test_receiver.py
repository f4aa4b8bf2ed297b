"""Buckets arrive in live tensors, or are refused by name; sender and receiver are threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fsdpbench.engine.device import Device
from fsdpbench.engine.weight_sync.digests import compute_digests
from fsdpbench.engine.weight_sync.groups import WeightGroup
from fsdpbench.engine.weight_sync.receiver import BucketReceiver, ReceiverState
from fsdpbench.engine.weight_sync.records import Bucket, TensorSpec
from fsdpbench.errors import WeightSyncError

CPU = Device("cpu")
SHAPES = {"embed": (9, 4), "norm": (5,), "head": (3, 4)}


def spec_of(name, tensor):
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name, tuple(tensor.shape), dtype)


def live_tensors(dtype=torch.bfloat16):
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}


def sources(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(3)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}


@pytest.fixture
def threads():
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def ends(threads):
    """A trainer's group, and a receiver that has joined it."""
    trainer = WeightGroup.listen("weights", 2, CPU, 20.0)
    receiver = BucketReceiver(live_tensors(), CPU, aliases={"tied": "embed"})

    def enter():
        group = WeightGroup.enter(trainer.address_for(1), CPU)
        group.join()
        receiver.attach(group)

    entering = threads.submit(enter)
    trainer.join()
    entering.result(20)
    yield trainer, receiver
    receiver.detach()
    trainer.close()


def send(group, bucket, tensors):
    if not bucket.packed:
        for spec in bucket.specs:
            group.broadcast(tensors[spec.name]).wait()
        return
    run = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    for spec, offset in zip(bucket.specs, bucket.offsets, strict=True):
        values = tensors[spec.name].view(-1).view(torch.uint8)
        run[offset : offset + spec.num_bytes] = values
    group.broadcast(run).wait()


def carry(threads, ends, packed, tensors, renamed=None):
    trainer, receiver = ends
    specs = [spec_of((renamed or {}).get(name, name), t) for name, t in tensors.items()]
    by_wire_name = {spec.name: t for spec, t in zip(specs, tensors.values(), strict=True)}
    for index, part in enumerate(part for part in (specs[:2], specs[2:]) if part):
        bucket = Bucket(index, tuple(part), packed)
        receiving = threads.submit(receiver.receive, bucket)
        send(trainer, bucket, by_wire_name)
        receiving.result(20)
        assert receiver.state is ReceiverState.PARTIAL


@pytest.mark.parametrize("packed", [True, False])
def test_tensors_arrive_bit_for_bit(threads, ends, packed):
    tensors = sources()
    carry(threads, ends, packed, tensors)
    digests = ends[1].finish()
    assert ends[1].state is ReceiverState.WHOLE
    assert digests == compute_digests(tensors.items())
    assert all(torch.equal(ends[1].live[name], tensors[name]) for name in tensors)


def test_a_rehearsal_touches_no_weight(threads, ends):
    trainer, receiver = ends
    taking = threads.submit(receiver.rehearse, 1000, 3)
    for _ in range(3):
        trainer.broadcast(torch.ones(1000, dtype=torch.uint8)).wait()
    taking.result(20)
    assert receiver.state is ReceiverState.WHOLE
    assert not any(tensor.any() for tensor in receiver.live.values())
    receiver.detach()
    with pytest.raises(WeightSyncError, match="without a weight-update group"):
        receiver.rehearse(1000, 1)


def test_a_tied_weight_counts_under_either_name(threads, ends):
    carry(threads, ends, True, sources(), renamed={"embed": "tied"})
    assert set(ends[1].finish()) == set(SHAPES)


def test_what_did_not_come_is_named_and_the_state_stays_partial(threads, ends):
    tensors = sources()
    del tensors["head"]
    carry(threads, ends, True, tensors)
    with pytest.raises(WeightSyncError, match="1 of 3 tensors did not come: head"):
        ends[1].finish()
    assert ends[1].state is ReceiverState.PARTIAL


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (TensorSpec("other", (9, 4), "bfloat16"), "other: no such weight here"),
        (TensorSpec("embed", (9, 5), "bfloat16"), r"bfloat16\[9, 5\] was sent, but here it is"),
        (TensorSpec("embed", (9, 4), "float32"), "weights are not cast on arrival"),
    ],
)
def test_foreign_tensors_are_refused_before_anything_is_received(spec, message):
    receiver = BucketReceiver(live_tensors(), CPU)
    with pytest.raises(WeightSyncError, match=message):
        receiver.receive(Bucket(0, (spec,)))
    assert receiver.state is ReceiverState.WHOLE


def test_a_bucket_without_a_group_is_refused():
    receiver = BucketReceiver(live_tensors(), CPU)
    with pytest.raises(WeightSyncError, match="before the weight-update group was made"):
        receiver.receive(Bucket(0, (TensorSpec("norm", (5,), "bfloat16"),)))


def test_abandoning_ends_a_wait(threads, ends):
    _, receiver = ends
    bucket = Bucket(0, (TensorSpec("norm", (5,), "bfloat16"),))
    receiving = threads.submit(receiver.receive, bucket)
    while receiver.state is ReceiverState.WHOLE and not receiving.done():
        pass
    receiver.abandon()
    with pytest.raises(WeightSyncError):
        receiving.result(10)
    assert receiver.state is ReceiverState.PARTIAL
    assert receiver.group is None
