from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fsdpbench.errors import ConfigError
from fsdpbench.reports.cli import report, write_reports
from fsdpbench.reports.run import load_run
from tests.reports.example_runs import SYNC_RUNS, make_mixed_records, write_run


def test_both_reports_are_written_and_the_ranking_is_printed(tmp_path, capsys):
    path = write_run(tmp_path / "run", make_mixed_records())
    report(path)
    printed = capsys.readouterr().out
    assert "20,480" in printed
    assert f"{path}/report.html" in printed
    assert (path / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert (path / "report.md").read_text().startswith("# fsdpbench report: run\n")


def test_json_names_the_files_and_the_ranking(mixed_path, tmp_path, capsys):
    report(mixed_path, out=tmp_path / "elsewhere", as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert answer["html"] == str(tmp_path / "elsewhere" / "report.html")
    assert answer["counts"] == {"ok": 8, "invalid": 1, "oom": 2, "hang": 1, "contaminated": 1}
    assert answer["ranking"][0]["tokens_per_second"] == 20480.0
    assert [entry["status"] for entry in answer["ranking"]].count("ok") == 8
    assert answer["problems"] == []


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("records", SYNC_RUNS.values(), ids=SYNC_RUNS)
def test_runs_that_send_weights_are_reported(tmp_path, capsys, records, as_json):
    path = write_run(tmp_path / "run", records)
    report(path, as_json=as_json)
    printed = capsys.readouterr().out
    assert (path / "report.html").exists()
    assert (path / "report.md").exists()
    if as_json:
        ranking = {entry["id"]: entry for entry in json.loads(printed)["ranking"]}
        for record in records:
            if record.sync is not None:
                pause = ranking[record.id]["sync_pause_seconds"]
                assert pause == record.sync.pause_seconds


def test_what_is_no_run_is_the_users_error(tmp_path):
    with pytest.raises(ConfigError, match="run directory"):
        report(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(mixed_run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--out"):
        write_reports(mixed_run, tmp_path / "file" / "below")


def test_a_report_is_replaced_whole(tmp_path):
    path = write_run(tmp_path / "run", make_mixed_records())
    (path / "report.html").write_text("old")
    files = write_reports(load_run(path))
    assert files.html.read_text().rstrip().endswith("</html>")
    assert not list(path.glob(".report*"))


def test_the_command_writes_the_report_without_torch(mixed_path, tmp_path):
    code = (
        "import sys; from pathlib import Path; from fsdpbench.reports.cli import report; "
        "report(Path(sys.argv[1]), Path(sys.argv[2])); sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(mixed_path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.html").stat().st_size > 1_000_000
