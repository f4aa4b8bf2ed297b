"""Adapters as folders: they load in plain peft, and those of peft load here."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdpbench.engine.checkpoint.adapter_folder import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    check_adapter_config,
    describe_adapters,
    name_base_model,
)
from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.models.load import build_meta_model
from fsdpbench.engine.models.lora import AdapterSettings
from fsdpbench.engine.models.preset_files import prepare_preset
from fsdpbench.engine.parallel.adapter_values import check_adapter_file
from fsdpbench.errors import CheckpointError
from tests.distributed.pool import run_on_ranks

# peft asks transformers by the name of 5.17
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
VALUES = "tests.distributed.payloads.lora_values"
WAIT = {"timeout_seconds": 60}
SETTINGS = AdapterSettings(rank=4, alpha=8, targets=("q_proj", "mlp.down_proj"))


def test_a_saved_folder_loads_in_plain_peft_and_on_another_mesh(tmp_path):
    from peft import PeftModel

    folder = tmp_path / "adapter"
    saved, *_ = run_on_ranks(f"{VALUES}:save", 2, backend="fsdp:t2", folder=str(folder), **WAIT)
    base = AutoModelForCausalLM.from_pretrained(saved["source"])
    plain = PeftModel.from_pretrained(base, folder).eval()
    with torch.no_grad():
        logits = plain(input_ids=saved["ids"][None]).logits[0, :-1].log_softmax(-1)
    wanted = logits.gather(1, saved["ids"][1:, None])[:, 0]
    assert (saved["logprobs"][:-1] - wanted).abs().max() < 2e-6
    assert (
        json.loads((folder / CONFIG_FILE).read_text())["base_model_name_or_path"]
        == (saved["source"])
    )
    first, second = run_on_ranks(f"{VALUES}:load", 2, backend="fsdp:d2", folder=str(folder), **WAIT)
    assert first["version"] == second["version"] == 5
    assert first["changed"]
    assert not first["wrong"]
    for found in (first, second):
        (error,) = found["errors"]
        assert "adapter-absent: there is no such folder" in error


def test_merged_weights_load_in_plain_transformers_and_here_without_counting_twice(tmp_path):
    folder = tmp_path / "merged"
    for found in run_on_ranks(
        f"{VALUES}:save_merged", 2, backend="fsdp:t2", folder=str(folder), **WAIT
    ):
        before, saved, loaded = found["logprobs"]
        assert torch.equal(before, saved)
        assert (loaded - before).abs().max() < 2e-6
        assert found["zero"]
    plain = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = plain(input_ids=found["ids"][None]).logits[0, :-1].log_softmax(-1)
    wanted = logits.gather(1, found["ids"][1:, None])[:, 0]
    assert (before[:-1] - wanted).abs().max() < 2e-6


@pytest.mark.parametrize("weight_format", ["adapter", "dcp"])
def test_an_engine_goes_on_with_its_adapters_on_another_mesh(tmp_path, weight_format):
    for found in run_on_ranks(
        "tests.distributed.payloads.lora_engine:resume_on_another_mesh",
        2,
        folder=str(tmp_path / "saved"),
        weight_format=weight_format,
        **WAIT,
    ):
        assert found["version"] == 3
        assert found["same"]
        assert found["found"] == pytest.approx(found["wanted"], rel=1e-5)


def test_a_folder_of_peft_is_accepted(tmp_path):
    from peft import LoraConfig, get_peft_model

    source = prepare_preset("tiny-llama", with_weights=True)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=list(SETTINGS.targets))
    plain = get_peft_model(AutoModelForCausalLM.from_pretrained(source), lora)
    plain.save_pretrained(tmp_path)
    config = TrainEngineConfig(
        path="tiny-llama",
        use_lora=True,
        lora_rank=4,
        lora_alpha=8,
        target_modules=list(SETTINGS.targets),
    )
    model = build_meta_model(config, source)
    assert model.adapters == SETTINGS
    check_adapter_config(tmp_path / CONFIG_FILE, SETTINGS)
    check_adapter_file(model, tmp_path / WEIGHTS_FILE)


CHANGES = {
    "rank": ({"r": 16}, "r=16 here and lora_rank=4 in the engine"),
    "alpha": ({"lora_alpha": 4}, "lora_alpha=4 here and lora_alpha=8 in the engine"),
    "kind": ({"peft_type": "IA3"}, "peft_type must be 'LORA'"),
    "bias": ({"bias": "all"}, "sets bias, which"),
    "variants": (
        {"use_dora": True, "rank_pattern": {"q_proj": 2}},
        "sets use_dora, rank_pattern, which",
    ),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_adapters_of_another_meaning_are_refused(tmp_path, change, message):
    file = tmp_path / CONFIG_FILE
    content = describe_adapters(SETTINGS, "base")
    file.write_text(json.dumps(content))
    check_adapter_config(file, SETTINGS)
    file.write_text(json.dumps({**content, **change}))
    with pytest.raises(CheckpointError, match=message):
        check_adapter_config(file, SETTINGS)


def test_a_configuration_that_is_no_json_is_named(tmp_path):
    file = tmp_path / CONFIG_FILE
    for text in ("{", "[]"):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=CONFIG_FILE):
            check_adapter_config(file, SETTINGS)


def test_an_engine_without_adapters_saves_none(tmp_path):
    (message,) = run_on_ranks(f"{VALUES}:refuse_without_adapters", 1, folder=str(tmp_path), **WAIT)
    assert "weight_format='adapter' for" in message
    assert "this engine has no adapters; set use_lora" in message


def test_the_base_is_named_by_its_hub_id_or_its_folder(tmp_path):
    assert name_base_model("org/model", tmp_path) == "org/model"
    assert name_base_model("tiny-llama", tmp_path) == str(tmp_path)
    assert name_base_model(str(tmp_path), tmp_path) == str(tmp_path)
