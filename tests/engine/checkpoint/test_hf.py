"""Saved folders are those of plain transformers; saving over an old one is all or nothing."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdpbench.engine.checkpoint.hf import choose_file_bytes, divide_files
from tests.distributed.pool import run_on_ranks

HF = "tests.distributed.payloads.checkpoint_hf"


@pytest.mark.parametrize(("path", "mesh"), [("tiny-qwen3", "t2"), ("tiny-llama", "d2")])
def test_a_saved_model_generates_the_same_tokens_in_transformers(tmp_path, path, mesh):
    target = tmp_path / "saved"
    results = run_on_ranks(
        f"{HF}:step_and_save",
        2,
        path=path,
        backend=f"fsdp:{mesh}",
        folder=str(target),
        timeout_seconds=60,
    )
    model, report = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(report.values())
    assert len(list(target.glob("*.safetensors"))) >= len(results)  # every rank wrote some
    assert all(count for _, count in results)
    for name, wanted in results[0][0].items():
        assert torch.equal(model.get_parameter(name), torch.from_numpy(wanted)), name
    reference = AutoModelForCausalLM.from_config(model.config)
    state = {name: torch.from_numpy(values) for name, values in results[0][0].items()}
    reference.load_state_dict(state, strict=False)
    reference.tie_weights()
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    generated = model.generate(ids, **settings)
    assert torch.equal(generated, reference.generate(ids, **settings))
    assert not list(tmp_path.glob(".*"))


def test_weights_and_training_state_come_back_on_another_mesh(tmp_path):
    folder = str(tmp_path / "saved")
    (saved, _) = run_on_ranks(
        f"{HF}:save_with_optimizer", 2, backend="fsdp:d2", folder=folder, timeout_seconds=60
    )
    for loaded in run_on_ranks(
        f"{HF}:load_with_optimizer", 2, backend="fsdp:t2", folder=folder, timeout_seconds=60
    ):
        assert loaded == {"version": 5, **saved}
    assert (tmp_path / "saved" / "optimizer" / ".metadata").is_file()
    assert AutoModelForCausalLM.from_pretrained(folder) is not None


def test_adapters_are_merged_into_what_is_saved(tmp_path):
    weights, merged, frozen = run_on_ranks(
        f"{HF}:save_merged", 2, folder=str(tmp_path), timeout_seconds=60
    )[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, torch.from_numpy(merged[name])), name
    assert weights == frozen


def test_files_suit_the_ranks():
    gib = 1 << 30
    assert choose_file_bytes(100 * gib, 8) == 2 * gib
    assert choose_file_bytes(8 * gib, 4) == gib
    assert choose_file_bytes(1000, 4) == 256 << 20
    files = {"a": "1", "b": "1", "c": "2", "d": "3"}
    assert divide_files(files, 2) == {"1": 0, "2": 1, "3": 0}
