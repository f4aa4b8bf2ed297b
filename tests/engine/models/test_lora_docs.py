"""The samples of docs/lora.md do what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml

from fsdpbench.engine.checkpoint.adapter_folder import write_adapter_files
from fsdpbench.engine.config.checkpoint import SaveLoadMeta
from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.models.load import build_meta_model
from fsdpbench.engine.models.preset_files import prepare_preset
from fsdpbench.engine.topology import find_violations

PAGE = (Path(__file__).parents[3] / "docs" / "lora.md").read_text(encoding="utf-8")


def samples(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def load_config():
    (text,) = samples("yaml")
    return TrainEngineConfig(**yaml.safe_load(text))


def test_the_configuration_is_one_and_fits_its_model():
    source = prepare_preset("tiny-llama", with_weights=False)
    config = load_config()
    model = build_meta_model(config, source)
    assert find_violations(config.with_changes({"use_lora": False}), 4, model.facts) == []
    assert model.adapters.targets == config.target_modules
    assert model.adapters.rank == 16


def test_the_layers_of_the_page_are_those_that_no_name_means():
    source = prepare_preset("tiny-llama", with_weights=False)
    model = build_meta_model(load_config().with_changes({"target_modules": []}), source)
    assert all(f"`{name}`" in PAGE for name in model.adapters.targets)


def test_an_engine_is_asked_as_the_page_says():
    calls = []

    class Engine:
        def save(self, meta):
            calls.append(meta)

        load = save

    exec(compile(samples("python")[0], "docs/lora.md", "exec"), {"engine": Engine()})
    assert calls == [SaveLoadMeta(path="adapters", weight_format="adapter")] * 2


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
def test_plain_peft_loads_the_folder(tmp_path, monkeypatch):
    source = prepare_preset("tiny-llama", with_weights=True)
    adapted = build_meta_model(load_config(), source)
    tensors = {
        name: torch.full(parameter.shape, 0.5)
        for name, parameter in adapted.named_adapter_parameters()
    }
    (tmp_path / "adapters").mkdir()
    write_adapter_files(tmp_path / "adapters", tensors, adapted.adapters, str(source))
    monkeypatch.chdir(tmp_path)
    scope = {"base_folder": source}
    exec(compile(samples("python")[1], "docs/lora.md", "exec"), scope)
    loaded = {n: p for n, p in scope["model"].named_parameters() if "lora_" in n}
    assert len(loaded) == len(tensors)
    assert all((parameter == 0.5).all() for parameter in loaded.values())
