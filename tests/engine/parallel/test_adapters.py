"""Adapters over the ranks: training, merging and iterating, against plain peft."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdpbench.engine.parallel.adapters import (
    find_adapted_layers,
    is_adapter_name,
    merge_adapter,
    name_in_adapter_file,
    name_without_adapter,
)
from tests.distributed.pool import run_on_ranks

LORA = "tests.distributed.payloads.lora_training"
WAIT = {"timeout_seconds": 60}
CASES = {
    "d2": ("tiny-llama", "fsdp:d2", {}),
    "t2": ("tiny-llama", "fsdp:t2", {}),
    "t2-tied": ("tiny-qwen3", "fsdp:t2", {"target_modules": ["self_attn.o_proj", "up_proj"]}),
    "c2": ("tiny-llama", "fsdp:c2", {}),
    "d2t2": ("tiny-llama", "fsdp:d2t2", {}),
    "d2-offload": ("tiny-llama", "fsdp:d2", {"fsdp": {"offload_params": True}}),
}


@pytest.mark.parametrize(("path", "backend", "fields"), CASES.values(), ids=CASES)
def test_three_steps_are_those_of_peft(path, backend, fields):
    ranks = 4 if backend == "fsdp:d2t2" else 2
    errors, *_ = run_on_ranks(
        f"{LORA}:compare_with_peft", ranks, path=path, backend=backend, **fields, **WAIT
    )
    moved = errors.pop("moved")
    assert moved > 1e-3  # else the comparison would say nothing
    assert max(errors.values()) < 1e-5, errors


def test_recomputing_layers_changes_no_gradient():
    for difference in run_on_ranks(f"{LORA}:compare_checkpointing", 2, backend="fsdp:t2", **WAIT):
        assert difference == 0


@pytest.mark.parametrize("backend", ["fsdp:d2", "fsdp:t2"])
def test_the_base_rests_in_the_computations_dtype_and_adapters_in_the_optimizers(backend):
    for found in run_on_ranks(f"{LORA}:describe_precisions", 2, backend=backend, **WAIT):
        assert found == {
            "base": {"torch.bfloat16"},
            "adapters": {"torch.float32"},
            "gradients": {"torch.float32"},
            "changed": True,
        }


@pytest.mark.gpu
def test_adapters_train_on_a_gpu():
    check_gpu_run(1, "fsdp:d1")


@pytest.mark.multi_gpu
@pytest.mark.parametrize("backend", ["fsdp:d2", "fsdp:t2"])
def test_adapters_train_on_two_gpus(backend):
    check_gpu_run(2, backend)


def check_gpu_run(ranks, backend):
    for found in run_on_ranks(
        f"{LORA}:check_on_gpus", ranks, backend=backend, device_type="cuda", **WAIT
    ):
        first, *_, last = found["logprobs"]
        assert last > first  # of the same rows, which were trained
        assert found["devices"] == {"cuda"}
        assert found["merged"] == "torch.bfloat16"
        assert found["changed"] > 0


def test_merging_rounds_once():
    generator = torch.Generator().manual_seed(3)
    weight, a, b = (
        torch.randn(shape, generator=generator).bfloat16() for shape in ((6, 5), (2, 5), (6, 2))
    )
    wanted = weight.double() + 0.5 * (b.double() @ a.double())
    merged = merge_adapter(weight, a, b, 0.5)
    assert merged.dtype == torch.float32
    assert (merged - wanted).abs().max() < 1e-6
    assert torch.equal(merged.bfloat16(), wanted.bfloat16())


def test_names_are_those_of_files():
    own = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert is_adapter_name(own)
    assert name_in_adapter_file(own) == (
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    )
    base = "model.layers.0.self_attn.q_proj.base_layer.bias"
    assert not is_adapter_name(base)
    assert name_without_adapter(base) == "model.layers.0.self_attn.q_proj.bias"
    assert not is_adapter_name("model.norm.weight")
    assert name_without_adapter("model.norm.weight") == "model.norm.weight"


def test_adapted_layers_are_known_by_their_children():
    layer = nn.Module()
    layer.base_layer = nn.Linear(4, 3)
    layer.scaling = {"default": 0.5}
    layer.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
    layer.lora_B = nn.ModuleDict({"default": nn.Linear(2, 3, bias=False)})
    model = nn.ModuleDict({"adapted": layer, "plain": nn.Linear(4, 3)})
    ((path, adapted),) = find_adapted_layers(model).items()
    assert path == "adapted"
    assert adapted.base is layer.base_layer
    assert adapted.scaling == 0.5
    assert adapted.lora_a.weight.shape == (2, 4)
    assert adapted.lora_b.weight.shape == (3, 2)
