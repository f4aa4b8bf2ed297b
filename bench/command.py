"""The command line and the environment of a trial: pure functions of its specification.

torchrun with a rendezvous of its own on the loopback interface: port 0 lets the kernel choose, so
two trials on one machine cannot meet. Children get an allow-listed environment: no secrets.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from fsdpbench.bench.folders import TrialFolder
from fsdpbench.bench.records import TrialSpec
from fsdpbench.bench.trial import Command

WORKER_MODULE = "fsdpbench.bench.worker"

PASSED = frozenset(
    {
        "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR",
        "LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "CPATH", "CC", "CXX",
        "PYTHONPATH", "PYTHONHASHSEED", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE",
        "VIRTUAL_ENV", "CONDA_PREFIX", "XDG_CACHE_HOME", "FSDPBENCH_CACHE",
        "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE",
    }
)  # fmt: skip
PASSED_PREFIXES = (
    "LC_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_",
    "TRITON_", "OMP_", "KMP_", "MKL_", "GOMP_", "MALLOC_", "TRANSFORMERS_", "FLASH_ATTENTION_",
    "UCX_", "FI_", "ROCM_", "HIP_",
)  # fmt: skip
SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|PRIVATE", re.IGNORECASE)


def build_command(
    spec: TrialSpec, folder: TrialFolder, environ: Mapping[str, str], num_cpus: int
) -> Command:
    """Return what starts the trial's worker on `spec.world_size` processes."""
    return Command(build_argv(spec, folder), build_environment(spec, environ, num_cpus))


def build_argv(spec: TrialSpec, folder: TrialFolder) -> list[str]:
    """Return the torchrun command; its logs go to one folder per rank under the trial's logs."""
    path = folder.path.resolve()
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        f"--nproc-per-node={spec.world_size}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        f"--rdzv-id={spec.id}",
        "--local-addr=127.0.0.1",
        "--max-restarts=0",
        f"--log-dir={path / 'logs'}",
        "--redirects=3",
        "-m",
        WORKER_MODULE,
        str(path),
    ]


def build_environment(spec: TrialSpec, environ: Mapping[str, str], num_cpus: int) -> dict[str, str]:
    """Return the allow-listed variables and the harness's own."""
    passed = {name: value for name, value in environ.items() if _is_passed(name)}
    if "FSDPBENCH_CACHE" in passed:  # the trial has a working folder of its own
        passed["FSDPBENCH_CACHE"] = str(Path(passed["FSDPBENCH_CACHE"]).expanduser().absolute())
    # the processes of a trial share the cores evenly, unless the user has said otherwise
    passed.setdefault("OMP_NUM_THREADS", str(max(1, num_cpus // spec.world_size)))
    if spec.device == "cpu":
        passed["CUDA_VISIBLE_DEVICES"] = ""
        # threads that spin while they wait slow a busy machine down fivefold
        passed.setdefault("OMP_WAIT_POLICY", "passive")
    return {
        **passed,
        "PYTHONUNBUFFERED": "1",  # what a rank said before it was killed is in its log
        "PYTHONFAULTHANDLER": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _is_passed(name: str) -> bool:
    allowed = name in PASSED or name.startswith(PASSED_PREFIXES)
    return allowed and not SECRET.search(name)
