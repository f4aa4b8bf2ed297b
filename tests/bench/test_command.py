import sys
from pathlib import Path

import pytest

from fsdpbench.bench.command import build_command
from fsdpbench.bench.folders import TrialFolder
from tests.bench.fakes import make_spec


def build(environ=None, num_cpus=8, **fields):
    folder = TrialFolder(Path("/runs/r/trials/abc"))
    return build_command(make_spec(**fields), folder, environ or {}, num_cpus)


def test_torchrun_meets_on_loopback_at_a_port_of_the_kernels_choice():
    argv = build(world_size=4).argv
    assert argv[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert {"--nproc-per-node=4", "--rdzv-endpoint=127.0.0.1:0", "--max-restarts=0"} <= set(argv)
    assert f"--rdzv-id={make_spec().id}" in argv
    assert argv[-3:] == ["-m", "fsdpbench.bench.worker", "/runs/r/trials/abc"]


@pytest.mark.parametrize(
    "name",
    ["PATH", "LC_ALL", "NCCL_DEBUG", "CUDA_HOME", "PYTORCH_CUDA_ALLOC_CONF", "HF_HUB_OFFLINE"],
)
def test_what_training_needs_is_passed(name):
    assert build({name: "x"}, device="cuda").env[name] == "x"


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN", "GITHUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "MY_VARIABLE",
        "NCCL_SECRET", "TORCH_TOKEN", "TRITON_PASSWORD", "CUDA_APIKEY", "MASTER_ADDR", "RANK",
        "SSH_AUTH_SOCK", "PYTHONSTARTUP", "FSDPBENCH_TRIAL",
    ],
)  # fmt: skip
def test_secrets_and_strangers_are_not_passed(name):
    assert name not in build({name: "x"}).env


@pytest.mark.parametrize(
    ("world_size", "num_cpus", "threads"), [(1, 2, "2"), (2, 2, "1"), (4, 2, "1"), (4, 64, "16")]
)
def test_ranks_share_the_cores(world_size, num_cpus, threads):
    assert build({}, num_cpus, world_size=world_size).env["OMP_NUM_THREADS"] == threads
    assert build({"OMP_NUM_THREADS": "5"}).env["OMP_NUM_THREADS"] == "5"


def test_threads_of_a_cpu_trial_do_not_spin():
    assert build().env["OMP_WAIT_POLICY"] == "passive"
    assert build({"OMP_WAIT_POLICY": "active"}).env["OMP_WAIT_POLICY"] == "active"
    assert "OMP_WAIT_POLICY" not in build(device="cuda").env


def test_a_cpu_trial_sees_no_gpu():
    assert build({"CUDA_VISIBLE_DEVICES": "0,1"}).env["CUDA_VISIBLE_DEVICES"] == ""
    passed = build({"CUDA_VISIBLE_DEVICES": "0,1"}, device="cuda").env
    assert passed["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_a_relative_cache_is_the_callers():
    env = build({"FSDPBENCH_CACHE": "cache"}).env
    assert env["FSDPBENCH_CACHE"] == str(Path.cwd() / "cache")
