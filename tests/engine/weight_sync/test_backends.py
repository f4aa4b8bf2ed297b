"""Stores and backends: addresses, and what is left of the environment."""

from __future__ import annotations

import os

import pytest

from fsdpbench.engine.weight_sync.backends import errors_left_to_us, find_local_address
from fsdpbench.engine.weight_sync.records import GroupAddress

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
