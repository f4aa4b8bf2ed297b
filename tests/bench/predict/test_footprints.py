import json
from pathlib import Path

import pytest

from fsdpbench.bench.predict.footprints import GPUS, device_overhead, device_total, find_gpu
from fsdpbench.errors import ConfigError
from fsdpbench.units import GIB, MIB

RECORDS = Path(__file__).parents[3] / "docs" / "measurements" / "h200-2026-12-01.jsonl"


def training_points():
    """The recorded points on one GPU; those of a weight sync share it with an inference server."""
    points = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    return [p for p in points if p["sync"] is None and p["world_size"] == 1]


def test_agrees_with_the_recorded_points():
    """1 % of every device total; 2 MiB where neither per-layer steps nor offload add kernels."""
    points = training_points()
    errors = []
    for point in points:
        found = device_total(point["peak_reserved_bytes"], "h200", num_communicators=1)
        assert found.is_measured
        errors.append(found.num_bytes - point["device_total_bytes"])
        assert abs(errors[-1]) <= 0.01 * point["device_total_bytes"], point["id"]
        fsdp = point["config"]["fsdp"]
        if not fsdp["per_layer_optim_step"] and not fsdp["offload_params"]:
            assert abs(errors[-1]) <= 2 * MIB, point["id"]
    assert len(points) == 19


@pytest.mark.parametrize(
    ("num_communicators", "overhead_gib"),
    [pytest.param(1, 1.56, id="d2 and t2"), pytest.param(2, 1.99, id="c2")],
)
def test_agrees_with_the_lab_book_on_two_gpus(num_communicators, overhead_gib):
    """NVML less reserved of the sweep of 2026-11-30; both sides were rounded to 0.01 GiB."""
    found = device_overhead("h200", num_communicators, num_ranks=2)
    assert found.num_bytes / GIB == pytest.approx(overhead_gib, abs=0.01)
    assert found.is_measured


def test_the_sum():
    """612 context + 139 kernels, then 558 alone or 840 with others, then 446 each."""
    assert device_overhead("h200", 0).num_bytes == 751 * MIB
    assert device_overhead("h200", 1).num_bytes == 1309 * MIB
    assert device_overhead("h200", 3, num_ranks=2).num_bytes == (751 + 840 + 2 * 446) * MIB
    assert device_total(5 * MIB, "h200", 1).num_bytes == 1314 * MIB


def test_says_what_was_not_measured():
    assert not device_total(0, "h200", 1, num_ranks=8).is_measured
    assert not device_total(0, "h100-80g", 1).is_measured
    assert [name for name, gpu in GPUS.items() if gpu.is_measured] == ["h200"]
    assert all(gpu.source for gpu in GPUS.values())


def test_refuses_an_unknown_gpu():
    with pytest.raises(ConfigError, match=r"gpu.*h300.*must be one of h200, h100-80g"):
        find_gpu("h300")
