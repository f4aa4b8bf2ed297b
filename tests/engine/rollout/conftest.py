"""A tiny model as a folder, another version of it, and plain transformers to compare with."""

from __future__ import annotations

import resource
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fsdpbench.engine.models.preset_files import prepare_preset
from tests.engine.rollout.server_stub import StubServer, start_stub

WEIGHTS = "model.safetensors"


@pytest.fixture
def many_descriptors():
    """Allow descriptors beyond 1023, which `select` does not take."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 1200:
        pytest.skip("this machine allows fewer descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 1200), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture(scope="session")
def first_folder(tmp_path_factory):
    """Weights large enough that sequences do not settle on one token."""
    folder = tmp_path_factory.mktemp("first")
    return write_version(folder, lambda name, values: values * (1 if "norm" in name else 3))


@pytest.fixture(scope="session")
def second_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("second")
    return write_version(
        folder, lambda name, values: values if "norm" in name else values.flip(0) * 3
    )


def write_version(folder, change):
    source = prepare_preset("tiny-qwen3", with_weights=True)
    shutil.copy(source / "config.json", folder)
    weights = {n: change(n, t).contiguous() for n, t in load_file(source / WEIGHTS).items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def first_model(first_folder):
    return AutoModelForCausalLM.from_pretrained(first_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def second_model(second_folder):
    return AutoModelForCausalLM.from_pretrained(second_folder, dtype=torch.float32).eval()


@pytest.fixture
def stub():
    """Return a server of another make that a test can bend."""
    server_stub = StubServer()
    server = start_stub(server_stub)
    yield server_stub
    server_stub.stopped.set()
    server_stub.paused.set()
    server.shutdown()
    server.server_close()
