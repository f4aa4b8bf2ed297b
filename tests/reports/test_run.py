from __future__ import annotations

import pytest

from fsdpbench.bench.records import encode
from fsdpbench.errors import ConfigError
from fsdpbench.reports.run import load_run
from tests.reports.example_runs import make_record, write_run


def test_a_whole_run_has_no_problems(mixed_run):
    assert len(mixed_run.records) == 13
    assert mixed_run.problems == ()
    assert mixed_run.sweep["seed"] == 1
    assert mixed_run.name == "mixed"
    assert mixed_run.trial("t000").samples_path.is_file()


def test_a_torn_last_line_loses_only_that_line(tmp_path):
    path = write_run(tmp_path / "run", [make_record(0), make_record(1)])
    with (path / "results.jsonl").open("a") as file:
        file.write(encode(make_record(2))[:200])
    run = load_run(path)
    assert [record.id for record in run.records] == ["t000", "t001"]
    assert len(run.problems) == 1
    assert "torn last line" in run.problems[0]


def test_the_last_record_of_an_id_counts(tmp_path):
    path = write_run(tmp_path / "run", [make_record(0), make_record(0, tokens_per_second=7.0)])
    run = load_run(path)
    assert [record.tokens_per_second for record in run.records] == [7.0]
    assert "1 records were replaced" in run.problems[0]


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]"])
def test_a_damaged_sweep_json_is_no_obstacle(tmp_path, content):
    path = write_run(tmp_path / "run", [make_record(0)])
    (path / "sweep.json").write_bytes(content)
    run = load_run(path)
    assert (len(run.records), run.sweep) == (1, {})


def test_a_sweep_that_recorded_nothing_yet(tmp_path):
    path = write_run(tmp_path / "run", [])
    (path / "results.jsonl").unlink()
    run = load_run(path)
    assert run.records == ()
    assert "no trial has finished" in run.problems[0]


def test_a_run_without_its_plan(tmp_path):
    path = write_run(tmp_path / "run", [make_record(0)])
    (path / "sweep.json").unlink()
    assert "sweep.json" in load_run(path).problems[0]


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no results\.jsonl and no sweep\.json"):
        load_run(tmp_path)
    with pytest.raises(ConfigError, match="no such directory"):
        load_run(tmp_path / "absent")


@pytest.mark.parametrize("trial_id", ["", ".", "..", "../trials/t000", "/etc", "a\0b", "absent"])
def test_only_plain_ids_lead_to_a_folder(mixed_run, trial_id):
    assert mixed_run.trial(trial_id) is None
