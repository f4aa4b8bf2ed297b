"""What stands in examples/ runs as its first lines say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fsdpbench.bench.space import load_space
from fsdpbench.engine.config.load import load_config
from fsdpbench.engine.topology import find_all_violations

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.slow
def test_the_training_script_learns():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(EXAMPLES / "train_sft.py"), "--backend=fsdp:d2"]
    command += ["--steps=5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[3].rstrip(",")) for line in done.stdout.splitlines()]
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.3


def test_the_engine_file_fits_eight_ranks():
    assert find_all_violations(load_config(EXAMPLES / "engine.yaml"), 8) == []


def test_the_sweep_file_is_a_space():
    assert load_space(EXAMPLES / "sweep.yaml").model == "tiny-llama"
