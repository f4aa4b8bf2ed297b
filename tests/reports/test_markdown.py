from __future__ import annotations

import re

import pytest

from fsdpbench.bench.records import TrialStatus
from fsdpbench.reports.markdown import escape, render_markdown
from fsdpbench.reports.run import load_run
from tests.reports.example_runs import (
    SYNC_RUNS,
    make_cpu_record,
    make_failed,
    make_record,
    write_run,
)


def cells_of(line):
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_the_ranking_is_a_table_with_units(mixed_run):
    lines = render_markdown(mixed_run).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| "))
    head, rule, first = (cells_of(line) for line in lines[start : start + 3])
    assert head[:4] == ["\\#", "parallel", "gradient_checkpointing", "offload_params"]
    assert len(head) == len(rule) == len(first) == 14
    assert rule[0] == "---:"
    assert dict(zip(head, first, strict=True))["tokens/s"] == "20,480"
    assert dict(zip(head, first, strict=True))["peak device"] == "18.00 GiB"
    assert dict(zip(head, first, strict=True))["step median"].startswith("403 ms (396 - 415 ms")


@pytest.mark.parametrize(
    "text",
    [
        "### oom: rank 1 ran out of GPU memory in the backward pass",
        "Class **cuda_oom**, first at rank 1, phase backward, confidence 98%.",
        "- Remedy: set gradient_checkpointing: true",
        "- logs/rank1/stderr.log:214: torch.OutOfMemoryError",
        "must divide num_key_value_heads=8. Use 1, 2, 4 or 8.",
        "- sweep command: fsdpbench sweep --axis",
    ],
)
def test_failures_refusals_and_facts_are_there(mixed_run, text):
    assert text in render_markdown(mixed_run)


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("a|b", "a\\|b"),
        ("<img src=x>", "\\<img src=x\\>"),
        ("two\nlines", "two lines"),
        ("[x](y)", "\\[x\\](y)"),
        ("`code`", "\\`code\\`"),
        ("a_b _c_", "a_b \\_c\\_"),
        ("&lt;", "&amp;lt;"),
        ("back\\slash", "back\\\\slash"),
        ("# head", "\\# head"),
    ],
)
def test_values_cannot_change_the_document(text, escaped):
    assert escape(text) == escaped


def test_a_hostile_axis_stays_in_its_cell(tmp_path):
    records = [make_record(i, axes={"note": f"x|y\n# z{i}"}) for i in range(2)]
    text = render_markdown(load_run(write_run(tmp_path / "run", records)))
    row = next(line for line in text.splitlines() if line.startswith("| 1 "))
    assert cells_of(row)[1] == "x\\|y \\# z0"
    assert len([line for line in text.splitlines() if line.startswith("# ")]) == 1


def test_a_cpu_run_and_an_empty_one(tmp_path):
    text = render_markdown(load_run(write_run(tmp_path / "cpu", [make_cpu_record(0)])))
    assert "no device memory to report" in text
    text = render_markdown(load_run(write_run(tmp_path / "none", [])))
    assert "No trial has been started." in text


def test_many_alike_failures_are_cut(tmp_path):
    records = [make_failed(index, TrialStatus.OOM) for index in range(15)]
    text = render_markdown(load_run(write_run(tmp_path / "run", records)))
    assert text.count("- Trial: ") == 10
    assert "and 5 more trials" in text


@pytest.mark.parametrize("records", SYNC_RUNS.values(), ids=SYNC_RUNS)
def test_runs_that_send_weights_render(tmp_path, records):
    lines = render_markdown(load_run(write_run(tmp_path / "run", records))).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| "))
    started = [record for record in records if record.status is not TrialStatus.INVALID]
    table = [cells_of(line) for line in lines[start : start + 2 + len(started)]]
    assert {len(row) for row in table} == {len(table[0])}
    assert ("sync pause" in table[0]) == any(record.sync is not None for record in records)
