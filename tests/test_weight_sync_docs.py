"""Commands, tables and sweeps of docs/weight-sync.md are as the page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from fsdpbench.bench.cli import app
from fsdpbench.bench.records import WorkloadSpec
from fsdpbench.bench.space import load_space
from fsdpbench.bench.sweep import plan_sweep
from fsdpbench.bench.sync_record import SyncRecord

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "weight-sync.md").read_text()
MEASURING = PAGE[PAGE.index("## Measuring") :]
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", MEASURING, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("fsdpbench")
]
SPACES = sorted((ROOT / "benchmarks" / "spaces").glob("sync-*.yaml"))


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_parse(line):
    _, verb, *arguments = shlex.split(line)
    get_command(app).commands[verb].make_context(verb, arguments)


@pytest.mark.parametrize("path", SPACES, ids=lambda path: path.stem)
def test_spaces_have_valid_points_alone(path):
    assert f"`{path.name}`" in MEASURING
    plan = plan_sweep(load_space(path), 1 if "one-gpu" in path.stem else 4)
    assert plan.num_valid == len(plan.points) >= 4
    assert all(point.spec.workload.syncs for point in plan.points)


def test_the_tables_name_every_field():
    named = set(re.findall(r"`(\w+)`", MEASURING))
    assert {name for name in WorkloadSpec.model_fields if name.startswith("sync_")} <= named
    told = {*SyncRecord.model_fields} - {"mode", "receivers", "receiver_devices", "connect_seconds"}
    rates = {"disk_write_bytes_per_second", "disk_read_bytes_per_second"}
    assert told - rates <= named


def test_the_python_sample_runs():
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(block, "docs/weight-sync.md", "exec"), {})
