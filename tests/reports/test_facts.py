from __future__ import annotations

import pytest

from fsdpbench.bench.records import TrialStatus
from fsdpbench.bench.sync_record import SyncRecord
from fsdpbench.reports.facts import (
    build_commands,
    build_environment,
    build_headlines,
    build_measurement,
    build_subtitle,
    format_moment,
)
from tests.reports.example_runs import (
    SYNC_RUNS,
    make_cpu_record,
    make_failed,
    make_mixed_records,
    make_record,
)


def values_of(facts):
    return {fact.name: fact.value for fact in facts}


def test_headlines_open_with_the_best_trial():
    headlines = {item.name: item for item in build_headlines(make_mixed_records())}
    assert list(headlines) == [
        "Best",
        "Step time",
        "Best over slowest",
        "Peak device memory",
        "Points",
    ]
    assert headlines["Best"].figure == "20,480 tokens/s"
    assert headlines["Best"].detail == "fsdp:d2"
    assert headlines["Best over slowest"].figure == "2.38 x"
    assert headlines["Peak device memory"].figure == "18.00 GiB"
    assert headlines["Points"].figure == "13"


def test_headlines_without_a_measured_trial():
    headlines = build_headlines([make_failed(0, TrialStatus.HANG)])
    assert [(item.name, item.figure) for item in headlines] == [("Best", "-"), ("Points", "1")]
    assert build_headlines([])[-1].detail == "no record yet"


def test_a_run_without_training_opens_with_its_shortest_pause():
    sync = SyncRecord(mode="disk", receivers=1, bytes=8, verified=True, pause_seconds=0.25)
    records = [make_record(0, step_seconds=[], tokens_per_second=None, sync=sync)]
    first = build_headlines(records)[0]
    assert (first.name, first.figure) == ("Shortest pause", "250 ms")


@pytest.mark.parametrize("records", SYNC_RUNS.values(), ids=SYNC_RUNS)
def test_every_run_that_sends_weights_has_its_facts(records):
    headlines = [item.name for item in build_headlines(records)]
    trained = any(record.tokens_per_second for record in records)
    sent = any(record.sync is not None for record in records)
    assert headlines[0] == ("Shortest pause" if sent and not trained else "Best")
    assert values_of(build_measurement(records))["commit"] == "0123456789ab"
    assert build_commands(records, {})
    assert build_environment(records)
    assert build_subtitle("r", records, {})


def test_on_cpu_the_memory_headline_is_the_host():
    headlines = {item.name: item for item in build_headlines([make_cpu_record(0)])}
    assert headlines["Peak host memory"].figure == "420.00 MiB"


def test_the_environment_is_flat_and_says_what_differs():
    other = {"torch": "2.11.0", "gpu": {"name": "NVIDIA H200", "count": 2}}
    facts = build_environment([make_record(0), make_record(1, environment=other)])
    assert values_of(facts) == {
        "torch": "differs: 2.13.0, 2.11.0",
        "gpu.name": "NVIDIA H200",
        "gpu.count": "2",
    }
    assert [fact.name for fact in facts if fact.differs] == ["torch"]


def test_measurement_names_commit_model_kernel_and_formula():
    values = values_of(build_measurement([make_record(0, dirty=True, workload={"seed": 3})]))
    assert values["commit"] == "0123456789ab, with uncommitted changes"
    assert values["model"] == "qwen3-0.6b"
    assert values["attention kernel"] == "varlen_attn"
    assert values["MFU formula"] == "6 * N * tokens / (peak * GPUs)"
    assert values["workload seed"] == "3"


def test_commands_are_quoted_for_a_shell():
    sweep = {"argv": ["fsdpbench", "sweep", "--out", "my runs"], "created_at": "2026-11-30"}
    records = [make_record(0, command=["python", "-m", "x", "a b"]), make_record(1)]
    values = values_of(build_commands(records, sweep))
    assert values["sweep command"] == "fsdpbench sweep --out 'my runs'"
    assert values["best trial"] == "python -m x 'a b'"
    assert values["created"] == "2026-11-30"
    assert values["time in trials"] == "1 min 01 s"


def test_commands_of_an_unknown_sweep():
    assert values_of(build_commands([], {})) == {}
    assert values_of(build_commands([make_record(3)], {}))["created"] == "2026-11-30 03:03 UTC"


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-11-30T03:37:34+00:00", "2026-11-30 03:37 UTC"),
        ("2026-11-30T05:37:34+02:00", "2026-11-30 03:37 UTC"),
        ("2026-11-30T03:37:34", "2026-11-30T03:37:34"),
        ("yesterday", "yesterday"),
    ],
)
def test_moments_are_in_utc(text, moment):
    assert format_moment(text) == moment


def test_environment_values_read_well():
    environment = {"gpus": ["H200", "H200"], "memory_bytes": 1 << 34, "nics": [], "n": {"a": [1]}}
    assert values_of(build_environment([make_record(0, environment=environment)])) == {
        "gpus": "2 x H200",
        "memory_bytes": "16.00 GiB",
        "nics": "none",
        "n.a": "[1]",
    }


def test_what_a_sweep_varies_is_listed_without_alarm():
    records = [make_record(0), make_record(1, world_size=4, commit="f" * 40)]
    facts = {fact.name: fact for fact in build_measurement(records)}
    assert (facts["world size"].value, facts["world size"].differs) == ("2, 4", False)
    assert facts["commit"].differs


def test_the_subtitle_counts_devices():
    sweep = {"created_at": "2026-11-30"}
    records = [make_record(0), make_record(1, world_size=4)]
    assert build_subtitle("r", records, sweep) == "Run r | 2 to 4 GPUs | 2026-11-30"
    assert "2 processes" in build_subtitle("r", [make_cpu_record(0)], {})
    assert build_subtitle("r", [], {}) == "Run r"
