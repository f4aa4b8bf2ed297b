"""Limits are rates of what was really carried, and leave nothing behind."""

import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from fsdpbench.bench import sync_limits
from fsdpbench.bench.sync_limits import measure_broadcast, measure_disk, time_broadcasts
from fsdpbench.engine.device import Device
from fsdpbench.engine.weight_sync import backends
from fsdpbench.engine.weight_sync.groups import WeightGroup
from fsdpbench.engine.weight_sync.receiver import BucketReceiver
from fsdpbench.engine.weight_sync.records import ReceiverTraits
from fsdpbench.errors import WeightSyncError, WorkerError

CPU = Device("cpu")


class ThreadReceiver:
    """A receiver that is a thread of this process; it has no weights."""

    traits = ReceiverTraits("local")

    def __init__(self, pool):
        self.pool = pool
        self.receiver = BucketReceiver({}, CPU)
        self.taken = []

    def init_weights_update_group(self, address) -> Future[None]:
        def enter():
            group = WeightGroup.enter(address, CPU)
            group.join()
            self.receiver.attach(group)

        return self.pool.submit(enter)

    def rehearse_broadcast(self, num_bytes, repeats) -> Future[None]:
        self.taken.append((num_bytes, repeats))
        return self.pool.submit(self.receiver.rehearse, num_bytes, repeats)

    def destroy_weights_update_group(self):
        self.receiver.detach()


def test_the_wire_is_measured_among_all_receivers(monkeypatch):
    monkeypatch.setitem(sync_limits.MESSAGE_BYTES, "cpu", 1 << 20)
    with ThreadPoolExecutor(2) as pool:
        receivers = [ThreadReceiver(pool) for _ in range(2)]
        assert measure_broadcast(receivers, CPU, 30.0) > 0
    assert [receiver.taken for receiver in receivers] == [[(1 << 20, 11)]] * 2
    assert all(receiver.receiver.group is None for receiver in receivers)


def test_a_receiver_that_fails_ends_the_measurement_at_once_and_is_named(monkeypatch):
    monkeypatch.setitem(sync_limits.MESSAGE_BYTES, "cpu", 1 << 20)
    monkeypatch.setattr(backends, "CONNECT_SECONDS", 0.5)  # the other one may come too late
    with ThreadPoolExecutor(4) as pool:
        for method in ("init_weights_update_group", "rehearse_broadcast"):
            receivers = [ThreadReceiver(pool) for _ in range(2)]
            death: Future[None] = Future()
            death.set_exception(WorkerError("ended by signal SIGKILL"))
            monkeypatch.setattr(receivers[1], method, lambda *_, death=death: death)
            began = time.monotonic()
            with pytest.raises(WeightSyncError, match=r"receiver 1 \(local\): .* SIGKILL"):
                measure_broadcast(receivers, CPU, 30.0)
            assert time.monotonic() - began < 20
            assert all(receiver.receiver.group is None for receiver in receivers)


def test_the_disk_is_measured_and_left_as_it_was(tmp_path):
    write, read = measure_disk(tmp_path / "plain", 20 << 20)
    assert write > 0
    assert read > 0
    assert list(tmp_path.iterdir()) == []
    assert all(rate > 0 for rate in measure_disk(tmp_path / "plain", 3)), "a tiny model"


@pytest.mark.gpu
def test_a_devices_messages_are_timed_by_its_own_clock():
    device = Device("cuda", torch.cuda.current_device())
    group = WeightGroup.listen("limit", 1, device, 30.0)
    group.join()
    seconds = time_broadcasts(group, device, 1 << 20, 4)
    group.close()
    assert len(seconds) == 4
    assert all(0 <= second < 1 for second in seconds)
