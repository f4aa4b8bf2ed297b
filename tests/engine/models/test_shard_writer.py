"""Files as transformers writes them, filled in order."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file

from fsdpbench.engine.models.shard_writer import ShardWriter, plan_weight_files
from fsdpbench.engine.parallel.weight_files import find_tensors

SHAPES = {name: torch.Size(shape) for name, shape in {"a": (4,), "b": (3,), "c": (9,)}.items()}


def test_small_models_are_one_file():
    assert set(plan_weight_files(SHAPES, torch.float32).values()) == {"model.safetensors"}


def test_files_fill_in_order_and_a_large_tensor_stands_alone():
    assert plan_weight_files(SHAPES, torch.float32, max_file_bytes=28) == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00001-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }
    assert len(set(plan_weight_files(SHAPES, torch.bfloat16, max_file_bytes=6).values())) == 3


def test_writes_what_was_planned(tmp_path):
    plan = plan_weight_files(SHAPES, torch.float32, max_file_bytes=28)
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    writer = ShardWriter(tmp_path, plan)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    assert (tmp_path / plan["a"]).exists()
    assert not (tmp_path / plan["c"]).exists()  # held until it is complete
    writer.finish()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": 64}, "weight_map": plan}
    for name, file in find_tensors(tmp_path).items():
        assert torch.equal(load_file(file)[name], tensors[name])


def test_one_file_has_no_index(tmp_path):
    writer = ShardWriter(tmp_path, plan_weight_files(SHAPES, torch.float32))
    for name, shape in SHAPES.items():
        writer.add(name, torch.zeros(shape))
    writer.finish()
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
