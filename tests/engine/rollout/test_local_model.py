"""The model of a local rollout: the same as transformers loads, replaced in place from folders."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsdpbench.engine.device import Device
from fsdpbench.engine.models.preset_files import prepare_preset
from fsdpbench.engine.rollout.local_model import build_local_model
from fsdpbench.errors import CheckpointError
from tests.engine.rollout.reference import logprobs_of

TOKENS = [[5, 6, 7, 8, 300], [1, 2]]


@pytest.fixture
def model(first_folder):
    built = build_local_model(first_folder, "float32", Device("cpu"))
    built.plan_load(first_folder)()
    return built


def test_it_is_the_model_that_transformers_loads(model, first_model):
    found = model.compute_logprobs(TOKENS)
    assert found == [pytest.approx(logprobs_of(first_model, t), abs=1e-4) for t in TOKENS]
    assert set(model.live) == {name for name, _ in first_model.named_parameters()}
    assert model.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert model.stop_ids == {2}
    for name, buffer in first_model.named_buffers():
        assert torch.equal(model.module.get_buffer(name), buffer)


def test_weights_are_replaced_in_place(model, second_folder, second_model):
    places = {name: tensor.data_ptr() for name, tensor in model.live.items()}
    model.plan_load(second_folder)()
    assert {name: tensor.data_ptr() for name, tensor in model.live.items()} == places
    found = model.compute_logprobs(TOKENS)
    assert found == [pytest.approx(logprobs_of(second_model, t), abs=1e-4) for t in TOKENS]


def test_stop_tokens_come_from_the_generation_config(first_folder, tmp_path):
    shutil.copytree(first_folder, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert build_local_model(tmp_path / "model", "float32", Device("cpu")).stop_ids == {3, 4}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("model.norm.weight"), r"missing model\.norm\.weight"),
        (lambda w: w.update(extra=torch.zeros(1)), "no place for extra"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(3)}), "of another shape"),
    ],
    ids=["missing", "unexpected", "shape"],
)
def test_weights_of_another_model_change_nothing(model, first_folder, tmp_path, change, words):
    shutil.copytree(first_folder, tmp_path / "model")
    weights = load_file(first_folder / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model" / "model.safetensors")
    before = model.compute_logprobs(TOKENS)
    with pytest.raises(CheckpointError, match=words):
        model.plan_load(tmp_path / "model")
    assert model.compute_logprobs(TOKENS) == before


def test_a_folder_without_a_model_is_an_error_of_ours(tmp_path):
    with pytest.raises(CheckpointError, match="holds no model that can be built"):
        build_local_model(tmp_path, "float32", Device("cpu"))


@pytest.mark.gpu
def test_a_gpu_gives_what_the_cpu_gives(first_folder, first_model):
    model = build_local_model(first_folder, "float32", Device("cuda", 0))
    model.plan_load(first_folder)()
    assert {tensor.device.type for tensor in model.live.values()} == {"cuda"}
    found = model.compute_logprobs(TOKENS)
    assert found == [pytest.approx(logprobs_of(first_model, t), abs=1e-3) for t in TOKENS]


def test_an_untied_head_is_a_tensor_of_its_own():
    folder = prepare_preset("tiny-llama", with_weights=True)
    model = build_local_model(folder, "bfloat16", Device("cpu"))
    model.plan_load(folder)()
    assert "lm_head.weight" in model.live
    assert model.aliases == {}
    assert {tensor.dtype for tensor in model.live.values()} == {torch.bfloat16}
