"""Saved folders are those of plain transformers; saving over an old one is all or nothing."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdpbench.engine.models.export import copy_companions, swap_folder
from fsdpbench.engine.models.preset_files import prepare_preset
from tests.distributed.pool import run_on_ranks

EXPORT = "tests.distributed.payloads.models_export"


@pytest.mark.parametrize(("path", "mesh"), [("tiny-qwen3", "d2t2"), ("tiny-llama", "d2")])
def test_a_saved_model_answers_as_the_trained_one(tmp_path, path, mesh):
    target = tmp_path / "saved"
    results = run_on_ranks(
        f"{EXPORT}:train_and_save",
        4 if mesh == "d2t2" else 2,
        path=path,
        backend=f"fsdp:{mesh}",
        folder=str(target),
    )
    model, report = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(report.values())
    assert len(list(target.glob("*.safetensors"))) > 1  # the test asks for small files
    for ids, logprobs, seen_on_save in results:
        logits = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        wanted = logits.gather(1, ids[1:, None])[:, 0]
        assert (logprobs[:-1] - wanted).abs().max() < 2e-6
        assert seen_on_save  # all ranks return after the folder is in place
    assert not list(tmp_path.glob(".*"))


def test_loading_a_saved_folder_brings_the_weights_back(tmp_path):
    for changed, restored in run_on_ranks(
        f"{EXPORT}:save_change_and_load", 2, backend="fsdp:d2", folder=str(tmp_path / "saved")
    ):
        assert changed
        assert restored


def test_the_iterator_gives_whole_tensors_to_rank_0_alone():
    first, second = run_on_ranks(f"{EXPORT}:iterate", 2, backend="fsdp:t2")
    assert first["names"] == second["names"]
    assert "lm_head.weight" not in first["names"]
    assert first["embedding"] == ((512, 128), "torch.bfloat16", "cpu")
    assert second["embedding"] is None


def test_companions_keep_the_configuration_and_the_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setenv("FSDPBENCH_CACHE", str(tmp_path / "cache"))
    bare = prepare_preset("tiny-llama", with_weights=False)
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source, target):
        folder.mkdir()
    (source / "config.json").write_text((bare / "config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "README.md"):
        (source / name).write_text("{}")
    copy_companions(source, target, torch.bfloat16)
    assert sorted(path.name for path in target.iterdir()) == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    before, after = (json.loads((f / "config.json").read_text()) for f in (source, target))
    assert before.pop("torch_dtype") == "float32"
    assert after.pop("dtype") == "bfloat16"
    assert before == after


def test_a_finished_folder_takes_the_place_of_the_old_one(tmp_path):
    partial, target = tmp_path / ".saved.partial", tmp_path / "saved"
    for number in range(2):
        partial.mkdir()
        (partial / f"file{number}").touch()
        swap_folder(partial, target)
        assert [path.name for path in tmp_path.rglob("*")] == ["saved", f"file{number}"]
