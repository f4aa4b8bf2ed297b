"""Presets on disk: whole folders that plain transformers reads, the same at every writing."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fsdpbench.engine.models.facts import read_model_facts
from fsdpbench.engine.models.preset_files import prepare_preset, write_preset


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FSDPBENCH_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama"])
def test_transformers_reads_a_preset(cache, name):
    folder = prepare_preset(name, with_weights=True)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    facts = read_model_facts(str(folder))
    assert sum(p.numel() for p in model.parameters()) == facts.num_parameters
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert abs(float(model.model.embed_tokens.weight.detach().std()) - 0.02) < 1e-3
    assert folder.parent == cache / "presets"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_a_preset_is_written_once_and_always_the_same(cache, tmp_path):
    folder = prepare_preset("tiny-llama", with_weights=True)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert prepare_preset("tiny-llama", with_weights=True) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    write_preset("tiny-llama", tmp_path / "again", with_weights=True)
    first, second = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "again"))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_bare_presets_hold_a_configuration_alone(cache):
    folder = prepare_preset("llama3-70b", with_weights=False)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert read_model_facts(str(folder)) == read_model_facts("llama3-70b")


def test_a_failed_write_leaves_no_file_open(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            write_preset("tiny-qwen3", tmp_path / "preset", with_weights=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    still_open = [entry.resolve() for entry in Path("/proc/self/fd").iterdir()]
    assert not [file for file in still_open if file.is_relative_to(tmp_path)]
