from __future__ import annotations

import json
import random

import pytest

from fsdpbench.reports.series import number, read_lines, read_loss, read_memory, thin
from tests.reports.example_runs import START, write_samples


def write(path, *lines):
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@pytest.mark.parametrize("limit", [4, 10, 101, 999])
@pytest.mark.parametrize("count", [1, 2, 5, 1000, 1003])
def test_thinning_keeps_ends_extremes_and_order(count, limit):
    rng = random.Random(count)
    x = [float(i) for i in range(count)]
    y = [rng.uniform(-1, 1) for _ in range(count)]
    thin_x, thin_y = thin(x, y, limit)
    assert len(thin_x) <= max(limit, 4)
    assert (thin_x[0], thin_x[-1]) == (x[0], x[-1])
    assert (min(thin_y), max(thin_y)) == (min(y), max(y))
    assert thin_x == sorted(set(thin_x))
    assert all(y[int(at)] == value for at, value in zip(thin_x, thin_y, strict=True))


def test_thinning_keeps_the_extremes_of_every_bucket():
    y = [0.0] * 1000
    for spike in range(50, 1000, 100):
        y[spike], y[spike + 20] = 1.0, -1.0
    _, kept = thin(list(range(1000)), y, 22)
    assert (kept.count(1.0), kept.count(-1.0)) == (10, 10)


def test_torn_and_foreign_lines_are_skipped(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n[1]\n\xff\xfe\n{"a": 2}\n{"a": ')
    assert list(read_lines(path)) == [{"a": 1}, {"a": 2}]
    assert list(read_lines(tmp_path / "absent.jsonl")) == []
    assert list(read_lines(tmp_path)) == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (2.5, 2.5),
        ("NaN", None),
        (10**400, None),
        (float("-inf"), None),
        (float("nan"), None),
        (True, None),
        (None, None),
    ],
)
def test_numbers_are_finite_or_absent(value, expected):
    assert number(value) == expected


def test_losses_that_are_no_numbers_are_left_out(tmp_path):
    lines = [{"step": 0, "loss": 2.0}, {"step": 1, "loss": "NaN"}, {"step": 2, "loss": 1.0}]
    series = read_loss(write(tmp_path / "steps.jsonl", *lines), 100)
    assert (series.x, series.y) == ((0.0, 2.0), (2.0, 1.0))
    assert read_loss(write(tmp_path / "none.jsonl", {"step": 1}), 100) is None


def sample(t, rank, source="allocator", **values):
    return {"t": START + t, "rank": rank, "source": source, **values}


def test_memory_starts_at_zero_seconds_and_skips_what_is_no_level(tmp_path):
    lines = [
        sample(1.0, 0, allocated_bytes=10, peak_allocated_bytes=99, retries=3),
        sample(2.0, 0, allocated_bytes=20, peak_allocated_bytes=99),
        sample(2.5, 0, source="nvml", unavailable="no GPU"),
        sample(3.0, 0, source="nvml", used_bytes=None),
        sample(3.0, 0, source="host", rss_bytes=7),
    ]
    series = read_memory(write(tmp_path / "s.jsonl", *lines), 100)
    assert [(s.name, s.x, s.y) for s in series] == [
        ("allocated (allocator)", (0.0, 1.0), (10.0, 20.0)),
        ("resident (host)", (2.0,), (7.0,)),
    ]
    assert series[0].peak == 20.0


def test_of_many_ranks_the_highest_is_kept_and_the_lowest_if_uneven(tmp_path):
    even = [sample(t, rank, allocated_bytes=100 + rank) for t in range(3) for rank in range(8)]
    series = read_memory(write(tmp_path / "even.jsonl", *even), 100)
    assert [s.name for s in series] == ["allocated (allocator), rank 7"]
    uneven = [
        sample(t, rank, allocated_bytes=100 * (rank + 1)) for t in range(3) for rank in (0, 1)
    ]
    series = read_memory(write(tmp_path / "uneven.jsonl", *uneven), 100)
    assert [(s.name, s.lowest) for s in series] == [
        ("allocated (allocator), rank 1", False),
        ("allocated (allocator), rank 0", True),
    ]


def test_a_curve_of_zeros_is_not_drawn(tmp_path):
    lines = [sample(t, 0, allocated_bytes=0, reserved_bytes=0) for t in range(3)]
    assert read_memory(write(tmp_path / "s.jsonl", *lines), 100) == []


def test_a_hundred_thousand_samples_are_thinned_with_their_peak(tmp_path):
    path = tmp_path / "samples.jsonl"
    write_samples(path, seed=1, num_samples=17_000, ranks=2, on_gpu=True)
    spike = sample(4000.0, 1, allocated_bytes=1 << 60)
    with path.open("a") as file:
        file.write(json.dumps(spike) + "\n")
    series = {s.name: s for s in read_memory(path, 400)}
    assert series["allocated (allocator), rank 1"].peak == float(1 << 60)
    assert all(len(s.x) <= 400 for s in series.values())
