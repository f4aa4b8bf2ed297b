"""The sender keeps one bucket on the wire and notices a model other than planned."""

from __future__ import annotations

import pytest
import torch

from fsdpbench.engine.device import Device
from fsdpbench.engine.weight_sync.buckets import plan_update
from fsdpbench.engine.weight_sync.digests import DigestSums, compute_digests
from fsdpbench.engine.weight_sync.fanout import Fanout
from fsdpbench.engine.weight_sync.records import TensorSpec
from fsdpbench.engine.weight_sync.timings import PhaseClock
from fsdpbench.engine.weight_sync.xccl import BucketSender
from fsdpbench.errors import WeightSyncError
from tests.distributed.pool import run_on_ranks
from tests.engine.weight_sync.engines import done

GPU = "tests.distributed.payloads.weight_sync_gpu"
CPU = Device("cpu")
TENSORS = {f"w{index}": torch.randn(10, 3 + index) for index in range(5)}


class Transfer:
    """A broadcast to nobody: keeps the bytes as they are when it has to be finished."""

    ended_at = None

    def __init__(self, log, tensor):
        self.log, self.tensor = log, tensor

    def wait(self, check):
        check()
        self.log.append(("wait", self.tensor.clone()))


class Wire:
    """Takes the place of a group: notes the order of events."""

    def __init__(self):
        self.log = []

    def broadcast(self, tensor):
        self.log.append(("broadcast", tensor.clone()))
        return Transfer(self.log, tensor)


def send(named, packed=True, digests=None):
    specs = [TensorSpec(name, tuple(t.shape), "bfloat16") for name, t in TENSORS.items()]
    plan = plan_update(specs, 160, packed=packed)
    wire, fanout = Wire(), Fanout([], 5.0)

    def gathers():
        for name, tensor in named:
            wire.log.append(("gather", name))
            yield name, tensor

    sender = BucketSender(
        plan, {0: wire}, CPU, PhaseClock(CPU), lambda _: [done()], fanout, digests
    )
    sender.send(gathers())
    return plan, wire.log


@pytest.mark.parametrize("packed", [True, False])
def test_the_next_bucket_is_gathered_while_one_is_on_the_wire(packed):
    plan, log = send(TENSORS.items(), packed)
    kinds = [kind for kind, _ in log]
    assert len(plan) > 2
    second_gather = kinds.index("gather", kinds.index("broadcast"))
    assert second_gather < kinds.index("wait"), "gathered before the first bucket has settled"
    sent = [values for kind, values in log if kind == "broadcast"]
    settled = [values for kind, values in log if kind == "wait"]
    assert all(torch.equal(a, b) for a, b in zip(sent, settled, strict=True)), "buffer reused"
    if not packed:
        wanted = [tensor.bfloat16() for tensor in TENSORS.values()]
        assert all(torch.equal(a, b) for a, b in zip(sent, wanted, strict=True))


def test_digests_are_those_of_the_wire():
    digests = DigestSums()
    send(TENSORS.items(), digests=digests)
    assert digests.collect() == compute_digests((n, t.bfloat16()) for n, t in TENSORS.items())


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ([("other", torch.zeros(10, 3))], r"other \[10, 3\]"),
        ([("w0", torch.zeros(10, 4))], r"w0 \[10, 4\]"),
        ([], "nothing"),
    ],
)
def test_a_model_other_than_planned_is_refused(named, found):
    with pytest.raises(WeightSyncError, match=rf"w0 \[10, 3\] was planned, .* gave {found}"):
        send(named)


@pytest.mark.multi_gpu
def test_weights_travel_between_gpus_and_are_verified():
    result, _ = run_on_ranks(f"{GPU}:update", 2, device_type="cuda", timeout_seconds=120)
    assert [timings["num_buckets"] for timings in result["outcome"]] == [4, 4, 4]
    assert all(timings["transfer_seconds"] > 0 for timings in result["outcome"])
    assert result["outcome"][2]["pause_seconds"] < 1


@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    ("size", "said"),
    [
        # NCCL holds a few MiB for a receiver, and takes them as sent
        ({"width": 2048, "chunk_mb": 16}, "2 of 8 tensors did not come"),
        ({"width": 16384, "chunk_mb": 1024}, "did not end within 5 s"),
    ],
    ids=["small", "large"],
)
def test_a_receiver_that_stays_away_ends_in_time_and_leaves_the_device_well(size, said):
    result, _ = run_on_ranks(
        f"{GPU}:update", 2, device_type="cuda", timeout_seconds=120, fault="skip bucket 2", **size
    )
    assert said in result["outcome"]
    assert result["seconds"] < 40
    assert result["healthy"]
