"""The group between trainer and receivers: members as threads of one process."""

from __future__ import annotations

import base64
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from fsdpbench.engine.device import Device
from fsdpbench.engine.weight_sync import groups
from fsdpbench.engine.weight_sync.backends import prefixed_store
from fsdpbench.engine.weight_sync.groups import GroupState, WeightGroup
from fsdpbench.engine.weight_sync.records import GroupAddress
from fsdpbench.errors import WeightSyncError
from tests.distributed.pool import run_on_ranks

GPU = "tests.distributed.payloads.weight_groups_gpu"
CPU = Device("cpu")


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def listen(world_size=2, seconds=20.0):
    return WeightGroup.listen("weights", world_size, CPU, seconds)


def entered(address, offset=0):
    group = WeightGroup.enter(address, CPU, offset)
    group.join()
    return group


def joined(threads, num_receivers=1, seconds=20.0):
    trainer = listen(num_receivers + 1, seconds)
    address = trainer.address_for(1)
    receivers = [threads.submit(entered, address, offset) for offset in range(num_receivers)]
    trainer.join()
    return trainer, [receiver.result(20) for receiver in receivers]


def test_bytes_reach_every_member(threads):
    trainer, receivers = joined(threads, 2)
    sent = torch.randn(300, 7).bfloat16()
    targets = [torch.zeros_like(sent) for _ in receivers]
    for _ in range(3):
        waits = [
            threads.submit(group.broadcast(target).wait)
            for group, target in zip(receivers, targets, strict=True)
        ]
        trainer.broadcast(sent).wait()
        for wait in waits:
            wait.result(20)
        assert all(torch.equal(target, sent) for target in targets)
        sent = sent * 2
    for group in (trainer, *receivers):
        group.close()
        assert group.state is GroupState.CLOSED
    with pytest.raises(WeightSyncError, match="closed; connect anew"):
        trainer.broadcast(sent)


def test_only_the_loopback_interface_is_bound_by_default():
    trainer = listen()
    address = trainer.address_for(1)
    assert (address.host, address.backend, address.first_rank) == ("127.0.0.1", "gloo", 1)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", address.port), 5)
    trainer.close()


def test_a_missing_receiver_ends_both_sides(threads):
    trainer = listen(world_size=3, seconds=1.0)
    one = threads.submit(entered, trainer.address_for(1))
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"Missing ranks: 2") as caught:
        trainer.join()
    assert "switch weight_update_mode to disk" in str(caught.value)
    with pytest.raises(WeightSyncError, match=r"Missing ranks: 2|aborted|failed|within"):
        one.result(20)
    assert time.monotonic() - began < 10
    trainer.close()


def test_a_receiver_with_too_many_ranks_is_refused():
    trainer = listen(world_size=2)
    with pytest.raises(WeightSyncError, match=r"rank 2 is outside 1\.\.1"):
        WeightGroup.enter(trainer.address_for(1), CPU, offset=1)
    trainer.close()


def test_a_rank_cannot_be_taken_twice(threads):
    trainer, (receiver,) = joined(threads)
    with pytest.raises(WeightSyncError, match="rank 1 is taken"):
        entered(trainer.address_for(1))
    trainer.close()
    receiver.close()


def test_a_closed_port_is_an_error_at_once():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    address = GroupAddress("127.0.0.1", port, "weights", 2, 1, "gloo", 20.0)
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match="cannot be reached"):
        WeightGroup.enter(address, CPU)
    assert time.monotonic() - began < 5


def test_kinds_of_devices_must_agree():
    address = GroupAddress("127.0.0.1", 1, "weights", 2, 1, "nccl", 1.0)
    with pytest.raises(WeightSyncError, match="uses nccl, which does not serve the receiver's cpu"):
        WeightGroup.enter(address, CPU)


def test_an_address_of_another_machine_cannot_be_bound():
    with pytest.raises(WeightSyncError, match=r"no port of 192\.0\.2\.1 can be bound"):
        WeightGroup.listen("weights", 2, CPU, 5.0, host="192.0.2.1")


def test_a_silent_peer_ends_at_the_time_out(threads):
    trainer, (receiver,) = joined(threads, seconds=1.0)
    with pytest.raises(WeightSyncError, match=r"within 1 s|failed"):
        receiver.broadcast(torch.zeros(1 << 20)).wait()
    trainer.abort()
    receiver.abort()


def test_abort_ends_a_wait(threads):
    trainer, (receiver,) = joined(threads)
    wait = threads.submit(receiver.broadcast(torch.zeros(1 << 20)).wait)
    receiver.abort()
    with pytest.raises(WeightSyncError):
        wait.result(10)
    trainer.abort()


@pytest.mark.parametrize("first", ["abort", "launch"])
def test_an_abort_in_the_midst_of_a_broadcast_is_no_hang(threads, first, monkeypatch):
    trainer, (receiver,) = joined(threads)
    launch = receiver._launch

    def launch_beside_an_abort(backend, flat):
        if first == "abort":
            receiver.abort()
        work = launch(backend, flat)
        receiver.abort()
        return work

    monkeypatch.setattr(receiver, "_launch", launch_beside_an_abort)
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"aborted|failed"):
        receiver.broadcast(torch.zeros(1 << 20))
    assert time.monotonic() - began < 10
    trainer.abort()


def test_an_abort_before_the_join_is_an_error_of_ours():
    trainer = listen(1)
    trainer.abort()
    with pytest.raises(WeightSyncError, match="joining was aborted"):
        trainer.join()


def test_a_check_ends_a_wait(threads):
    trainer, (receiver,) = joined(threads)

    def give_up():
        raise WeightSyncError("the other side said no")

    with pytest.raises(WeightSyncError, match="said no"):
        receiver.broadcast(torch.zeros(1 << 20)).wait(give_up)
    trainer.abort()
    receiver.abort()


class IdBackend:
    """Takes the place of NCCL: tells an id through the store, then waits for the members."""

    def __init__(self, address, store):
        self.own, self.everybody = prefixed_store(address, store), threading.Event()

    def allreduce(self, tensors):
        self.own.set("0", b"\x00id\xff")
        self.everybody.wait(20)
        return CompletedWork()

    def abort(self):
        self.everybody.set()


class CompletedWork:
    def is_completed(self):
        return True

    def wait(self):
        return True


@pytest.fixture
def minting(monkeypatch):
    group = listen(seconds=0.5)
    group.address = replace(group.address, backend="nccl", greets=False)
    backends = []

    def build(address, rank, store):
        backends.append(IdBackend(address, store))
        return backends[-1]

    monkeypatch.setattr(groups, "build_backend", build)
    group.mint_id()
    yield group, backends[0]
    group.abort()


def test_receivers_may_join_by_an_id(minting):
    group, backend = minting
    address = group.address_for(1)
    assert base64.b64decode(address.unique_id) == b"\x00id\xff"
    assert not group.is_connected
    backend.everybody.set()
    group.join()
    assert group.is_connected


def test_receivers_that_do_not_come_by_the_id_end_the_join(minting):
    group, _ = minting
    with pytest.raises(WeightSyncError, match=r"joining did not end within 0\.5 s"):
        group.join()


def test_an_abort_ends_the_wait_for_receivers(minting, threads):
    group, _ = minting
    group.address = replace(group.address, timeout_seconds=60.0)
    waiting = threads.submit(group.join)
    group.abort()
    with pytest.raises(WeightSyncError, match="aborted"):
        waiting.result(20)


def test_ids_need_nccl():
    group = listen()
    with pytest.raises(WeightSyncError, match="2 ranks over gloo cannot join by an NCCL id"):
        group.mint_id()
    group.abort()


@pytest.mark.gpu
def test_torch_tells_the_id_of_its_communicator():
    (result,) = run_on_ranks(f"{GPU}:mint_id", 1, device_type="cuda", timeout_seconds=60)
    assert result["id_bytes"] == 128
    assert result["is_set"]
    assert "did not end within 3 s" in result["said"]
    assert result["healthy"]


@pytest.mark.multi_gpu
def test_a_receiver_joins_by_raw_nccl():
    trainer, receiver = run_on_ranks(f"{GPU}:join_by_id", 2, device_type="cuda", timeout_seconds=90)
    assert trainer["sent"] == receiver["arrived"]
    assert receiver["summed"] == 1.0
