"""First values of adapters, and files that do not fit."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import save_file

from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.device import Device
from fsdpbench.engine.models.load import build_meta_model
from fsdpbench.engine.models.preset_files import prepare_preset
from fsdpbench.engine.parallel.adapter_values import (
    check_adapter_file,
    draw_factor,
    fill_adapters,
    read_adapters,
)
from fsdpbench.errors import CheckpointError
from tests.distributed.pool import run_on_ranks

VALUES = "tests.distributed.payloads.lora_values"
CONFIG = TrainEngineConfig(
    path="tiny-llama", use_lora=True, lora_rank=4, target_modules=["q_proj", "down_proj"]
)
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def model():
    model = build_meta_model(CONFIG, prepare_preset("tiny-llama", with_weights=False))
    model.to_empty(device="cpu")  # nothing in this model is tied
    return model


@pytest.fixture
def tensors(model):
    return {
        name: torch.full(parameter.shape, float(number))
        for number, (name, parameter) in enumerate(model.named_adapter_parameters())
    }


def test_first_values_are_bitwise_the_same_for_every_mesh():
    digests = {
        run_on_ranks(f"{VALUES}:digest", ranks, backend=f"fsdp:{mesh}", timeout_seconds=60)[0]
        for mesh, ranks in {"d1": 1, "d2": 2, "t2": 2, "d2t2": 4}.items()
    }
    assert len(digests) == 1
    other = run_on_ranks(f"{VALUES}:digest", 1, backend="fsdp:d1", seed=8, timeout_seconds=60)
    assert other[0] not in digests


def test_a_is_uniform_and_b_zero(model):
    fill_adapters(model, CONFIG, Device("cpu"))
    for name, parameter in model.named_adapter_parameters():
        if "lora_B" in name:
            assert not parameter.any(), name
            continue
        bound = 1 / math.sqrt(parameter.shape[1])
        assert parameter.abs().max() <= bound
        assert parameter.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)


def test_factors_differ_by_name_and_seed():
    shape = torch.Size([4, 8])
    drawn = [draw_factor(seed, name, shape, "cpu") for seed, name in ((1, "a"), (1, "b"), (2, "a"))]
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[0], draw_factor(1, "a", shape, "cpu"))


def test_a_file_gives_every_adapter_its_values(model, tensors, tmp_path):
    file = tmp_path / "adapters.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, file)
    check_adapter_file(model, file)
    read_adapters(model, file)
    for name, parameter in model.named_adapter_parameters():
        assert torch.equal(parameter, tensors[name]), name
        assert parameter.dtype == torch.float32


def test_files_that_do_not_fit_are_refused_with_names(model, tensors, tmp_path):
    file = tmp_path / "adapters.safetensors"
    del tensors[FIRST]
    tensors["other"] = torch.zeros(1)
    second = next(iter(tensors))
    tensors[second] = torch.zeros(3, 3)
    save_file(tensors, file)
    with pytest.raises(CheckpointError) as raised:
        check_adapter_file(model, file)
    text = str(raised.value)
    assert f"missing {FIRST}" in text
    assert "unexpected other" in text
    assert f"of another shape: {second} (file [3, 3], model [128, 4])" in text


def test_a_file_that_is_cut_short_cannot_be_read(model, tensors, tmp_path):
    file = tmp_path / "adapters.safetensors"
    save_file(tensors, file)
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"adapters.safetensors cannot be read"):
        check_adapter_file(model, file)
