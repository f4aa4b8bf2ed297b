"""Samples of docs/memory.md run, and the sweeps behind its figures are valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from fsdpbench.bench.cli import app
from fsdpbench.bench.space import load_space
from fsdpbench.bench.sweep import plan_sweep

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "memory.md").read_text()
SPACES = sorted(
    path
    for path in (ROOT / "benchmarks" / "spaces").glob("*.yaml")
    if not path.name.startswith("sync-")  # docs/weight-sync.md has those
)


def samples(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_python_sample_runs():
    (block,) = samples("python")
    exec(compile(block, "docs/memory.md", "exec"), {})


@pytest.mark.parametrize("line", samples("sh")[0].splitlines())
def test_commands_parse(line):
    _, verb, *arguments = line.split()
    get_command(app).commands[verb].make_context(verb, arguments)


@pytest.mark.parametrize("path", SPACES, ids=lambda path: path.stem)
def test_spaces_have_valid_points_alone(path):
    assert f"`{path.name}`" in PAGE
    plan = plan_sweep(load_space(path), 2)
    assert plan.num_valid == len(plan.points) >= 2


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
