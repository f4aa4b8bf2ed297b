"""The connection plans for all engines together, and gives each its ranks and its names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpbench.engine.device import Device
from fsdpbench.engine.weight_sync.connection import XcclConnection
from fsdpbench.engine.weight_sync.fanout import Fanout
from fsdpbench.engine.weight_sync.groups import WeightGroup
from fsdpbench.engine.weight_sync.records import ReceiverTraits, TensorSpec
from fsdpbench.engine.weight_sync.source import SourceModel
from fsdpbench.errors import WeightSyncError
from tests.engine.weight_sync.engines import TableEngine, done

SPECS = tuple(TensorSpec(f"model.layers.{index}.w", (8,), "bfloat16") for index in range(4))
SOURCE = SourceModel(SPECS, num_layers=4)


def connection_to(*traits, engine_class=TableEngine, seconds=1.0):
    fanout = Fanout([engine_class(one) for one in traits], seconds)
    return XcclConnection(fanout, SOURCE, Device("cpu"), bucket_bytes=1 << 20, host="127.0.0.1")


def test_one_receiver_that_takes_no_packed_buckets_decides_for_all():
    packed = ReceiverTraits("local", world_size=2)
    both = connection_to(packed, ReceiverTraits("sglang", world_size=4, takes_packed=False))
    assert not any(item.bucket.packed for item in both.plan)
    assert both.world_size == 7
    assert not both.greets
    alone = connection_to(packed)
    assert all(item.bucket.packed for item in alone.plan)
    assert alone.greets
    assert alone.num_bytes == sum(spec.num_bytes for spec in SPECS)


def test_each_stage_has_buckets_of_its_own():
    staged = connection_to(ReceiverTraits("local", pipeline_size=2))
    assert [(item.stage, len(item.bucket.specs)) for item in staged.plan] == [(0, 2), (1, 2)]


class NotingEngine(TableEngine):
    def init_weights_update_group(self, address):
        self.calls.append((address.first_rank, address.world_size, address.stage))
        return done()


def test_ranks_follow_each_other_and_missing_ones_leave_no_group():
    traits = (ReceiverTraits("local", world_size=2), ReceiverTraits("local"))
    connection = connection_to(*traits, engine_class=NotingEngine, seconds=0.3)
    with pytest.raises(WeightSyncError, match="Missing ranks: 1, 2, 3"):
        connection.connect()
    assert [engine.calls for engine in connection.receivers.engines] == [[(1, 4, 0)], [(3, 4, 0)]]
    assert not connection.groups


def test_an_id_is_minted_before_receivers_hear_of_the_group(monkeypatch):
    log = []

    class IdEngine(TableEngine):
        def init_weights_update_group(self, address):
            log.append(address.unique_id)
            return done()

    def mint_id(group):
        log.append("mint")
        group.address = replace(group.address, unique_id="aWQ=")

    monkeypatch.setattr(WeightGroup, "mint_id", mint_id)
    monkeypatch.setattr(WeightGroup, "join", lambda group, check: log.append("join"))
    traits = ReceiverTraits("vllm", joins_by_id=True)
    connection = connection_to(traits, engine_class=IdEngine)
    connection.connect()
    assert log[0] == "mint"
    assert sorted(log[1:]) == ["aWQ=", "join"]
    connection.disconnect()
