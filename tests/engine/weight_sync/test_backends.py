"""Stores and backends: addresses, and what is left of the environment."""

from __future__ import annotations

import os
import socket
import time

import pytest

from fsdpbench.engine.weight_sync import backends
from fsdpbench.engine.weight_sync.backends import (
    errors_left_to_us,
    find_local_address,
    open_store,
)
from fsdpbench.engine.weight_sync.records import GroupAddress
from fsdpbench.errors import WeightSyncError

NAME = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_a_member_on_the_trainers_machine_binds_no_public_interface(host):
    address = GroupAddress(host, 9, "weights", 2, 1, "gloo", 1.0)
    assert find_local_address(address).startswith("127.")


@pytest.mark.parametrize("before", [None, "1"])
def test_the_watchdog_of_other_groups_keeps_its_setting(monkeypatch, before):
    monkeypatch.delenv(NAME, raising=False)
    if before:
        monkeypatch.setenv(NAME, before)
    with errors_left_to_us():
        assert os.environ[NAME] == "0"
    assert os.environ.get(NAME) == before


def test_a_store_that_does_not_answer_is_given_up_long_before_the_time_out(monkeypatch):
    monkeypatch.setattr(backends, "CONNECT_SECONDS", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = GroupAddress(*silent.getsockname(), "weights", 2, 1, "gloo", 60.0)
        began = time.monotonic()
        with pytest.raises(WeightSyncError, match="group weights: no store at 127"):
            open_store(address)
        assert time.monotonic() - began < 20
