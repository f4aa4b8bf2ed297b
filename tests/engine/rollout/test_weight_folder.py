from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fsdpbench.engine.rollout.weight_folder import WeightInventory
from fsdpbench.errors import ConfigError, WeightSyncError
from tests.engine.rollout.server_stub import write_weights

SHAPES = {"model.embed_tokens.weight": [16, 4], "model.norm.weight": [4]}


def test_headers_are_read_as_safetensors_writes_them(tmp_path):
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 16}}')
    inventory = WeightInventory.read(tmp_path)
    assert inventory.shapes == {name: tuple(shape) for name, shape in SHAPES.items()}
    assert (inventory.vocab_size, inventory.is_tied) == (16, False)


def test_index_names_the_files(tmp_path):
    write_weights(tmp_path, SHAPES)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    assert set(WeightInventory.read(tmp_path).shapes) == set(SHAPES)
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(WeightSyncError, match="00001-of-00002"):
        WeightInventory.read(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda whole: whole[:-1], "cut off"),
        (lambda whole: whole[:20], "no whole safetensors file"),
        (lambda _: b"", "no whole safetensors file"),
        (lambda _: b"\xff" * 100, "no whole safetensors file"),
        (lambda _: (2).to_bytes(8, "little") + b"[]", "no whole safetensors file"),
        (lambda _: (8).to_bytes(8, "little") + b'{"a": 1}', "no whole safetensors file"),
    ],
)
def test_damaged_files_are_named(tmp_path, content, message):
    path = Path(write_weights(tmp_path, SHAPES)) / "model.safetensors"
    path.write_bytes(content(path.read_bytes()))
    with pytest.raises(WeightSyncError, match=f"model.safetensors.*{message}"):
        WeightInventory.read(tmp_path)


def test_folders_without_files(tmp_path):
    with pytest.raises(WeightSyncError, match=r"config\.json"):
        WeightInventory.read(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(WeightSyncError, match="no JSON object"):
        WeightInventory.read(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightSyncError, match="safetensors"):
        WeightInventory.read(tmp_path)


@pytest.mark.parametrize("is_tied", [False, True])
def test_tied_heads_may_travel_or_not(is_tied):
    shapes = {name: tuple(shape) for name, shape in SHAPES.items()}
    inventory = WeightInventory(shapes, is_tied, 16)
    with_head = {**shapes, "lm_head.weight": (16, 4)}
    WeightInventory(with_head, is_tied, 16).check_tensors(shapes, "here")
    if is_tied:
        inventory.check_tensors(with_head, "here")
        WeightInventory(with_head, is_tied, 16).check_complete(set(shapes), "here")
        return
    with pytest.raises(WeightSyncError, match=r"unexpected: lm_head\.weight"):
        inventory.check_tensors(with_head, "here")
    with pytest.raises(WeightSyncError, match=r"lacks lm_head\.weight"):
        WeightInventory(with_head, is_tied, 16).check_complete(set(shapes), "here")


def test_ids_outside_the_vocabulary():
    inventory = WeightInventory({}, False, 16)
    inventory.check_ids([[0, 15], []])
    WeightInventory({}, False, None).check_ids([[99]])
    with pytest.raises(ConfigError, match="sequence 1: token id 16"):
        inventory.check_ids([[0], [16]])
