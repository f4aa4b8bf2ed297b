import math

import pytest

from fsdpbench.bench.records import Record, TrialStatus, encode
from fsdpbench.bench.sync_record import (
    SyncRecord,
    SyncRound,
    SyncSeconds,
    name_round,
    share_of_disk_limit,
    share_of_limit,
    steady_pauses,
    summarise_rounds,
)


def make_rounds(*pauses):
    return [
        SyncRound(kind=name_round(index), pause_seconds=pause, transfer_seconds=pause / 2)
        for index, pause in enumerate(pauses)
    ]


def test_only_steady_rounds_count():
    rounds = make_rounds(90.0, 80.0, 1.0, 3.0, 2.0)
    assert [entry.kind for entry in rounds] == ["cold", "warmup", "steady", "steady", "steady"]
    medians = summarise_rounds(rounds)
    assert medians["pause_seconds"] == 2.0
    assert medians["transfer_seconds"] == 1.0
    assert set(medians) == set(SyncSeconds.model_fields)
    assert summarise_rounds(rounds[:1])["pause_seconds"] == 90.0, "a broken-off trial"


def test_a_record_carries_it_both_ways():
    rounds = make_rounds(3.0, 2.0, 1.0)
    sync = SyncRecord(
        mode="xccl", receivers=2, bytes=8, verified=True, rounds=rounds, **summarise_rounds(rounds)
    )
    record = Record(id="a", status=TrialStatus.OK, sync=sync)
    back = Record.model_validate_json(encode(record))
    assert back.sync == sync
    assert steady_pauses(back.sync) == [1.0]
    assert steady_pauses(None) == []


@pytest.mark.parametrize(
    ("seconds", "limit", "share"), [(2.0, 10.0, 0.5), (2.0, None, None), (0.0, 10.0, None)]
)
def test_the_share_of_a_rate(seconds, limit, share):
    assert share_of_limit(10, seconds, limit) == share


def test_the_share_of_the_disk_counts_writing_and_reading():
    seconds = SyncSeconds(write_seconds=3.0, transfer_seconds=5.0, apply_seconds=2.0)
    assert math.isclose(share_of_disk_limit(seconds, 10, 10.0, 5.0), 3.0 / 5.0)
    assert share_of_disk_limit(seconds, 10, None, 5.0) is None
    assert share_of_disk_limit(SyncSeconds(), 10, 1.0, 1.0) is None
