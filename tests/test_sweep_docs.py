"""Every sample of docs/sweep.md does what the page says."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from fsdpbench.bench.cli import app
from fsdpbench.bench.folders import RunFolder
from fsdpbench.bench.invocation import SweepOptions, resolve_space
from fsdpbench.bench.records import Record, TrialStatus
from fsdpbench.bench.space import load_space
from fsdpbench.bench.store import ResultWriter
from fsdpbench.bench.sweep import plan_sweep

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "sweep.md").read_text()


def samples(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("line", [line for block in samples("sh") for line in block.splitlines()])
def test_commands_parse_and_have_points(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.yaml").write_text(samples("yaml")[0])
    program, verb, *arguments = shlex.split(line)
    assert program == "fsdpbench"
    command = get_command(app).commands[verb]
    options = command.make_context(verb, arguments).params
    if options["resume"]:
        return
    given = SweepOptions(
        space=options["space"] and Path(options["space"]),
        axes=list(options["axis"] or ()),
        preset=options["preset"],
        model=options["model"],
        world_size=options["world_size"],
        device=options["device"],
    )
    plan = plan_sweep(resolve_space(given, RunFolder(tmp_path)), 0)
    assert plan.num_valid == len(plan.points) >= 2


def test_the_space_file_is_valid(tmp_path):
    path = tmp_path / "space.yaml"
    (block,) = samples("yaml")
    path.write_text(block)
    plan = plan_sweep(load_space(path), 0)
    assert plan.num_valid == len(plan.points) == 6


def test_the_example_is_valid():
    plan = plan_sweep(load_space(ROOT / "examples" / "sweep.yaml"), 0)
    assert plan.num_valid == len(plan.points) == 3 * 2 * 2


def test_the_python_sample_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    writer = ResultWriter(Path("runs/mine/results.jsonl"))
    writer.append(Record(id="abc", status="ok", tokens_per_second=7.0))
    writer.close()
    (block,) = samples("python")
    exec(compile(block, "docs/sweep.md", "exec"), {})
    assert capsys.readouterr().out == "abc ok {} 7.0\n"


def test_the_table_names_every_field_and_status():
    named = set(re.findall(r"`(\w+)`", PAGE))
    assert set(Record.model_fields) <= named
    assert {status.value for status in TrialStatus} <= named
