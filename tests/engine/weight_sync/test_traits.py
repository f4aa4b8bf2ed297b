"""What does not fit between trainer and rollout engines is said before anything is sent."""

from __future__ import annotations

import logging

import pytest

from fsdpbench.engine.config.weight_sync import WeightUpdateMeta
from fsdpbench.engine.weight_sync.records import ReceiverTraits
from fsdpbench.engine.weight_sync.source import SourceModel
from fsdpbench.engine.weight_sync.traits import check_traits
from fsdpbench.errors import WeightSyncError
from tests.engine.weight_sync.engines import TableEngine

SOURCE = SourceModel((), num_layers=4)


def check(*traits, mode="xccl", source=SOURCE, can_publish=True, **meta):
    engines = [TableEngine(one) for one in traits]
    settings = WeightUpdateMeta(**{"path": "/shared", **meta})
    check_traits(engines, settings, source, mode=mode, can_publish=can_publish)


def test_what_fits_passes():
    check(ReceiverTraits("local"), ReceiverTraits("vllm", world_size=2))
    check(ReceiverTraits("vllm", pipeline_size=4), ReceiverTraits("vllm", pipeline_size=4))
    check(ReceiverTraits("vllm"), ReceiverTraits("sglang"), mode="disk")


@pytest.mark.parametrize(
    ("traits", "options", "message"),
    [
        ([ReceiverTraits("vllm", channels=("disk",))], {}, r"receiver 0 \(vllm\) takes disk, not"),
        (
            [ReceiverTraits("vllm")],
            {"source": SourceModel((), 4, adapters_only=True)},
            "takes no adapters alone",
        ),
        ([ReceiverTraits("vllm", pipeline_size=5)], {}, r"has 5 pipeline stages; .* has 1\.\.4"),
        (
            [ReceiverTraits("vllm", pipeline_size=2), ReceiverTraits("sglang", pipeline_size=2)],
            {},
            "sglang with 2 stages, vllm with 2 stages",
        ),
        (
            [ReceiverTraits("local")],
            {"on_failure": "disk", "can_publish": False},
            "no way to write",
        ),
    ],
)
def test_what_does_not_fit_is_named(traits, options, message):
    with pytest.raises(WeightSyncError, match=message):
        check(*traits, **options)


def test_receivers_that_join_by_id_stay_among_themselves():
    vllm = ReceiverTraits("vllm", joins_by_id=True)
    check(vllm, vllm)
    with pytest.raises(WeightSyncError, match="local, vllm join groups in different ways"):
        check(vllm, ReceiverTraits("local"))


def test_all_problems_come_at_once():
    with pytest.raises(WeightSyncError, match=r"receiver 0 .*; receiver 1 "):
        check(*[ReceiverTraits("vllm", channels=("disk",))] * 2)


def test_what_cannot_be_verified_is_said(caplog):
    with caplog.at_level(logging.WARNING):
        check(ReceiverTraits("sglang"), verify=True)
    assert "receiver 0 (sglang) tells no digests" in caplog.text
