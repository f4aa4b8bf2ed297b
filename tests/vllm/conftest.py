"""One real vLLM server for all tests here, and two models of one geometry for it to serve."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fsdpbench.engine.rollout.client import ServerSettings, connect_server

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
INSTALLED = ROOT / ".venv-vllm" / ".installed"  # written last, so that half an installation is none
START_SECONDS = 300
POLL_SECONDS = 0.5
END_SECONDS = 30
TOKEN = "open-sesame"
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # pause, reload and versions
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_API_KEY": TOKEN,  # in the environment, since command lines are everybody's to read
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONDONTWRITEBYTECODE": "",  # the installer leaves it to the first start to compile
}
OPTIONS = [
    *("--host", "127.0.0.1", "--served-model-name", "policy", "--skip-tokenizer-init"),
    *("--dtype", "float32", "--max-model-len", "512", "--enforce-eager"),
    *("--logprobs-mode", "processed_logprobs"),
    *("--weight-transfer-config", '{"backend": "nccl"}'),
]


def pytest_collection_modifyitems(items):
    if INSTALLED.exists() or os.environ.get("FSDPBENCH_REQUIRE_VLLM") == "1":
        return
    reason = "needs the server of .venv-vllm: make test-vllm"
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.skip(reason=reason))


@dataclass(frozen=True)
class Policy:
    """A model as the server loads it, and as transformers runs it."""

    folder: Path
    model: LlamaForCausalLM

    def check_greedy(self, prompt: list[int], tokens: list[int]) -> None:
        """Assert that each token is the most probable one, ties within noise aside."""
        with torch.no_grad():
            logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0]
        logits = logits[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens, dtype=torch.int64)[:, None])[:, 0]
        assert bool((chosen > logits.max(-1).values - 1e-3).all())

    def score(self, tokens: list[int]) -> list[float]:
        """Return log p(token | before) of each token but the first."""
        with torch.no_grad():
            logprobs = self.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        return logprobs[:-1].gather(1, torch.tensor(tokens)[1:, None]).flatten().tolist()


@pytest.fixture(scope="session")
def policies(tmp_path_factory):
    """Return two models; heads of 64, since vLLM's CPU attention knows no smaller ones than 32."""
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=512,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,  # clear winners, so that greedy tokens are the same everywhere
    )
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
        folder = tmp_path_factory.mktemp(f"policy{seed}")
        model.save_pretrained(folder)
        made.append(Policy(folder, model))
    return made


@pytest.fixture(scope="session")
def server_url(policies, tmp_path_factory):
    """Start the server, wait until it answers, end its process group afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    log_path = tmp_path_factory.mktemp("server") / "log"
    module = "vllm.entrypoints.openai.api_server"
    model = ("--model", str(policies[0].folder), "--port", str(port))
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            # ends with the tests, even if those are ended themselves and clean nothing up
            ["setpriv", "--pdeathsig", "TERM", PYTHON, "-m", module, *model, *OPTIONS],
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_up(process, url, log_path)
        yield url
    finally:
        end_group(process)


def wait_until_up(process, url, log_path):
    for _ in range(int(START_SECONDS / POLL_SECONDS)):
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            pass
        try:
            process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        break
    pytest.fail("the server did not start:\n" + log_path.read_text(errors="replace")[-5000:])


def end_group(process):
    """End the server and its workers, which are in its process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            continue


@pytest.fixture
def connect(server_url):
    """Return a function that connects to the server; connections end with the test."""
    opened = []

    def connect_once(**settings):
        engine = connect_server(
            ServerSettings(
                server_url, "vllm", **{"token": TOKEN, "timeout_seconds": 60.0, **settings}
            )
        )
        opened.append(engine)
        return engine

    yield connect_once
    for engine in opened:
        engine.close()
