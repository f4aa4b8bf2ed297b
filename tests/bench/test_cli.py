"""The command as users start it; exit codes 0, 1, 2, 5 and 130."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fsdpbench.bench.cli import app
from fsdpbench.bench.entry_point import run_app
from fsdpbench.bench.processes import list_marked
from fsdpbench.bench.records import Record
from fsdpbench.bench.store import ResultWriter
from tests.bench.fakes import wait_until

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from fsdpbench.bench.cli import main; main()"]


def run(*arguments, cwd, **fields):
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=cwd,
        text=True,
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        **fields,
    )


def make_run(path, *records):
    writer = ResultWriter(path / "results.jsonl")
    for record in records:
        writer.append(record)
    writer.close()


def test_help_loads_nothing_heavy(tmp_path):
    code = (
        "import sys; import fsdpbench.bench.cli;"
        "print([m for m in ('torch', 'pydantic', 'pandas', 'jinja2', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True
    )
    assert done.stdout.strip() == "[]"
    done = run("sweep", "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "--axis" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["sweep", "--axis", "paralel=fsdp:d1"], 1, "did you mean 'parallel'"),
        (["sweep", "none.yaml"], 1, "none.yaml: cannot be read"),
        (["sweep", "--preset", "quik"], 1, "use quick, mesh, memory"),
        (["sweep", "--device", "cuda"], 1, "no GPU was found"),
        (["sweep", "--model", "no/such", "--out", "r"], 1, ""),
        (["sweep", "--world-size", "many"], 2, "--world-size"),
        (["sweep", "--no-such-option"], 2, "no-such-option"),
        (["sync", "--model", "tiny-llama", "--parallel", "fsdp:t3"], 1, "must divide"),
        (["sync", "--mode", "awex"], 2, "--mode"),
        (["export", "none"], 1, "holds no records"),
        (["report", "none"], 1, "none"),
    ],
)
def test_mistakes_of_the_user(tmp_path, arguments, code, message):
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_sweep_without_a_valid_point_is_the_users_mistake_and_is_recorded(tmp_path):
    done = run("sweep", "--axis", "parallel=fsdp:t3", "--out", "r", "--json", cwd=tmp_path)
    assert done.returncode == 1
    (record,) = json.loads(done.stdout)["records"]
    assert record["status"] == "invalid"
    assert "needs 3 processes" in record["reason"]
    assert (tmp_path / "r" / "report.html").exists()
    again = run("sweep", "--axis", "parallel=fsdp:t3", "--out", "r", cwd=tmp_path)
    assert again.returncode == 1
    assert "pass --resume" in again.stderr


def test_export_and_report(tmp_path):
    make_run(tmp_path / "r", Record(id="a", status="ok", tokens_per_second=5.0))
    done = run("export", "r", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "r/results.parquet\n")
    assert (tmp_path / "r" / "results.parquet").stat().st_size > 0
    done = run("report", "r", "--json", cwd=tmp_path)
    assert done.returncode == 0
    assert json.loads(done.stdout)["html"] == "r/report.html"


def test_ctrl_c_ends_with_130_and_leaves_no_process(tmp_path):
    process = subprocess.Popen(
        [*COMMAND, "sweep", "--axis", "parallel=fsdp:d1", "--out", "r"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    trials = str((tmp_path / "r" / "trials").resolve())
    assert wait_until(lambda: list_marked(trials), 60)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "finished trials are kept" in err
    assert "Traceback" not in err
    assert list_marked(trials) == []
    assert (tmp_path / "r" / "results.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["sweep", ""], "SPACE"),
        (["sweep", "--axis", ""], "--axis"),
        (["sweep", "--preset", ""], "--preset"),
        (["sweep", "--model", ""], "--model"),
        (["sweep", "--data", " "], "--data"),
        (["sweep", "--out", ""], "--out"),
        (["sweep", "--device", ""], "--device"),
        (["sweep", "--world-size", ""], "--world-size"),
        (["sweep", "--timeout", ""], "--timeout"),
        (["report", ""], "RUN"),
        (["report", "r", "--out", ""], "--out"),
        (["export", ""], "RUN"),
        (["export", "r", "--out", ""], "--out"),
    ],
)
def test_an_empty_argument_is_a_usage_error_and_not_the_working_folder(
    tmp_path, monkeypatch, capsys, arguments, option
):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path, Record(id="a", status="ok", tokens_per_second=5.0))
    assert run_app(app, "fsdpbench", [*arguments, "--json"]) == 2
    (error,) = json.loads(capsys.readouterr().out)["error"]
    assert error["where"] == option
    assert [file.name for file in tmp_path.iterdir()] == ["results.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sweep", "--axis", "paralel=fsdp:d1"], "did you mean 'parallel'"),
        (["sweep", "none.yaml"], "cannot be read"),
        (["sweep", "--resume"], "name the run with --out"),
        (["report", "none"], "must be a run directory"),
        (["export", "none"], "holds no records"),
    ],
)
def test_errors_of_every_command_are_json(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert run_app(app, "fsdpbench", [*arguments, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["exit_code"] == 1
    assert words in " ".join(answer["error"][0].values())


def test_a_sweep_whose_readers_have_gone_keeps_its_results(tmp_path):
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [*COMMAND, "sweep", "--axis", "parallel=fsdp:t3", "--out", "r"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=write_end,
        stderr=write_end,
        timeout=60,
        check=False,
    )
    os.close(write_end)
    assert done.returncode == 1, "as without a pipe: no point is valid"
    assert (tmp_path / "r" / "results.jsonl").read_text().count("\n") == 1
    assert (tmp_path / "r" / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "pipe"),
    [
        (["sweep", "s.yaml", "--json"], "s.yaml"),
        (["report", "r"], "r/results.jsonl"),
    ],
    ids=["plan", "report"],
)
def test_ctrl_c_at_any_moment_ends_with_130(tmp_path, arguments, pipe):
    """The command stands where it reads the pipe when the signal comes."""
    (tmp_path / "r").mkdir()
    os.mkfifo(tmp_path / pipe)
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert wait_until(lambda: reads_from(tmp_path / pipe), 60)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    if "--json" in arguments:
        assert json.loads(out)["exit_code"] == 130


def reads_from(pipe):
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_a_real_sweep_with_a_trial_that_crashes_ends_with_5_and_keeps_the_other(tmp_path):
    axes = ["--axis", "parallel=fsdp:d1", "--axis", "fault=crash@1,none", "--axis", "steps=2"]
    done = run("sweep", *axes, "--out", "r", "--json", cwd=tmp_path, timeout=300)
    assert done.returncode == 5, done.stderr
    crashed, ok = json.loads(done.stdout)["records"]
    assert (crashed["status"], ok["status"]) == ("crashed", "ok")
    assert "injected crash on rank 0 before step 1" in crashed["reason"]
    assert crashed["verdict"]["root_rank"] == 0
    assert len(ok["step_seconds"]) == 2
    assert ok["losses"][-1] < ok["losses"][0]
    again = run("sweep", "--out", "r", "--resume", "--json", cwd=tmp_path, timeout=60)
    assert again.returncode == 5, "what has a record is not run again"
    assert json.loads(again.stdout)["records"] == [crashed, ok]
