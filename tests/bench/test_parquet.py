import json

import pandas as pd
import pytest

from fsdpbench.bench.parquet import flatten_record, save_parquet
from fsdpbench.bench.records import Record, Verdict
from fsdpbench.bench.store import StoreError
from fsdpbench.bench.sync_record import SyncRecord
from tests.reports.example_runs import SYNC_RUNS

RECORDS = [
    Record(
        id="a",
        status="ok",
        axes={"parallel": "fsdp:d2", "n": 1, "lengths": [1, 2]},
        config={"path": "tiny"},
        step_seconds=[0.1, 0.2],
        phases={"forward": 0.05},
        peak_host_bytes=1 << 40,
        sync=SyncRecord(mode="disk", receivers=1, bytes=8, verified=True, pause_seconds=0.25),
    ),
    Record(
        id="b",
        status="crashed",
        axes={"parallel": "fsdp:d1", "n": "auto", "extra": 1.5},
        verdict=Verdict(**{"class": "other"}, cause="x"),
        phases={"forward": 1},
    ),
]


def test_a_table_comes_back_with_a_column_for_each_axis_and_phase(tmp_path):
    path = tmp_path / "results.parquet"
    save_parquet(RECORDS, path)
    table = pd.read_parquet(path)
    assert list(table["id"]) == ["a", "b"]
    assert list(table["status"]) == ["ok", "crashed"]
    assert list(table["axes.parallel"]) == ["fsdp:d2", "fsdp:d1"]
    assert list(table["axes.n"]) == ["1", '"auto"'], "values of two kinds become JSON"
    assert table["axes.extra"].isna().tolist() == [True, False]
    assert table["sync.pause_seconds"][0] == 0.25
    assert list(table["phases.forward"]) == [0.05, 1.0]
    assert list(table["step_seconds"][0]) == [0.1, 0.2]
    assert table["peak_host_bytes"][0] == 1 << 40
    assert json.loads(table["config"][0]) == {"path": "tiny"}
    assert json.loads(table["verdict"][1])["class"] == "other"
    assert [file.name for file in tmp_path.iterdir()] == ["results.parquet"]


def test_lists_among_the_axes_are_text():
    assert flatten_record(RECORDS[0])["axes.lengths"] == "[1, 2]"


def test_a_place_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(StoreError, match="cannot be written"):
        save_parquet(RECORDS, tmp_path / "missing" / "results.parquet")


@pytest.mark.parametrize("records", SYNC_RUNS.values(), ids=SYNC_RUNS)
def test_runs_that_send_weights_are_tables(tmp_path, records):
    save_parquet(records, tmp_path / "results.parquet")
    table = pd.read_parquet(tmp_path / "results.parquet")
    assert list(table["id"]) == [record.id for record in records]
