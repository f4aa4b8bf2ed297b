"""Phases of an update in seconds."""

from __future__ import annotations

import pytest

from fsdpbench.engine.device import Device
from fsdpbench.engine.weight_sync.timings import PhaseClock, UpdateTimings


def test_phases_sum_up_and_stay_apart():
    clock = PhaseClock(Device("cpu"))
    clock.add("apply", 0.25)
    clock.add("apply", 0.5)
    for _ in range(3):
        with clock.phase("gather"):
            sum(range(1000))
    seconds = clock.read()
    assert seconds["apply"] == 0.75
    assert 0 < seconds["gather"] < 1
    assert set(seconds) == {"apply", "gather"}


def test_a_phase_that_fails_counts_and_raises():
    clock = PhaseClock(Device("cpu"))
    with pytest.raises(KeyError), clock.phase("gather"):
        raise KeyError("x")
    assert clock.read()["gather"] > 0


def test_timings_are_plain_values():
    assert UpdateTimings("xccl", num_bytes=3).to_json()["num_bytes"] == 3


@pytest.mark.gpu
def test_device_work_is_measured_by_events():
    import torch

    device = Device("cuda", 0)
    clock = PhaseClock(device)
    x = torch.randn(4096, 4096, device="cuda")
    with clock.phase("pack"):
        for _ in range(20):
            x = x @ x / 64
    assert clock.read()["pack"] > 1e-3
