"""The scenarios of examples/ pass the check and train."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fsdpbench.diagnose.checks.machine import Machine
from fsdpbench.diagnose.checks.static import check_config
from fsdpbench.engine.config.load import load_config
from tests.distributed.pool import run_on_ranks

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "scenarios"
FILES = sorted(FOLDER.glob("*.yaml"))
LAPTOP = Machine(num_gpus=0, num_cores=4, memory_bytes=16 << 30)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_check_passes_on_eight_ranks(path):
    report = check_config(path, 8, LAPTOP)
    assert report.exit_code == 0, report.findings


SMALL = {"path": "tiny-qwen3", "dtype": "float32", "mb_spec.max_tokens_per_mb": 128}


@pytest.mark.parametrize(
    ("names", "backend"),
    [
        (["memory_limited"], "fsdp:d2"),
        (["high_performance"], "fsdp:d1t2"),
        (["ppo_actor", "ppo_critic"], "fsdp:d2"),
        (["lora"], "fsdp:d2"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else value,
)
def test_a_small_model_trains_one_step(names, backend):
    configs = [load_config(FOLDER / f"{name}.yaml") for name in names]
    dumped = [c.with_changes({**SMALL, "backend": backend}).model_dump() for c in configs]
    for stats in run_on_ranks(
        "tests.distributed.payloads.scenarios:train_one_step", 2, configs=dumped
    ):
        assert len(stats) == len(names)
        for figures in stats:
            assert figures["update_successful"] == 1.0
            assert math.isfinite(figures["loss"])
