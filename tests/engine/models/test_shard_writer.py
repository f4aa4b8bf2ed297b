"""Files as transformers writes them, filled in order, tensor by tensor."""

from __future__ import annotations

import json
import os
import resource
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from fsdpbench.engine.models import shard_writer
from fsdpbench.engine.models.shard_writer import (
    ShardWriter,
    plan_weight_files,
    spread_weight_files,
    write_index,
)
from fsdpbench.engine.parallel import off_device
from fsdpbench.engine.parallel.weight_files import find_tensors

SHAPES = {name: torch.Size(shape) for name, shape in {"a": (2, 2), "b": (3,), "c": (9,)}.items()}


def make_tensors(dtype=torch.float32):
    return {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}


def test_small_models_are_one_file():
    assert set(plan_weight_files(SHAPES, torch.float32).values()) == {"model.safetensors"}


def test_files_fill_in_order_and_a_large_tensor_stands_alone():
    assert plan_weight_files(SHAPES, torch.float32, max_file_bytes=28) == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00001-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }
    assert len(set(plan_weight_files(SHAPES, torch.bfloat16, max_file_bytes=6).values())) == 3


def test_neighbours_are_spread_over_files():
    shapes = {f"w{index}": torch.Size([4, 3]) for index in range(30)}
    plan = spread_weight_files(shapes, torch.bfloat16, 4)
    assert list(plan) == list(shapes)
    assert set(plan.values()) == {f"model-{n:05d}-of-00004.safetensors" for n in (1, 2, 3, 4)}
    assert all(a != b for a, b in pairwise(plan.values()))


def test_files_are_of_like_size():
    shapes = {f"w{index}": torch.Size([4, 1 + index % 3]) for index in range(30)}
    plan = spread_weight_files(shapes, torch.bfloat16, 4)
    sizes = [
        sum(shapes[n].numel() for n, f in plan.items() if f == file) for file in set(plan.values())
    ]
    assert max(sizes) - min(sizes) <= 12, sizes


@pytest.mark.parametrize("num_files", [0, 1])
def test_one_file_is_not_spread(num_files):
    plan = spread_weight_files(SHAPES, torch.float32, num_files)
    assert set(plan.values()) == {"model.safetensors"}


def test_no_file_is_empty():
    assert len(set(spread_weight_files(SHAPES, torch.float32, 9).values())) == len(SHAPES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("piece_bytes", [6, 1 << 20])
def test_writes_what_was_planned(tmp_path, monkeypatch, dtype, piece_bytes, durable):
    monkeypatch.setattr(shard_writer, "SYNC_BYTES", 8)
    monkeypatch.setattr(off_device, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(off_device, "MAX_PIECES", 2)
    plan = plan_weight_files(SHAPES, dtype, max_file_bytes=28)
    tensors = make_tensors(dtype)
    writer = ShardWriter(tmp_path, plan, SHAPES, dtype, durable=durable)
    for name, tensor in reversed(tensors.items()):
        writer.add(name, tensor)
    writer.finish()
    write_index(tmp_path, plan, SHAPES, dtype)
    for name, file in find_tensors(tmp_path).items():
        assert torch.equal(load_file(file)[name], tensors[name])
        assert writer.file_bytes[file.name] == file.stat().st_size
    if dtype == torch.float32:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index == {"metadata": {"total_size": 64}, "weight_map": plan}


@pytest.mark.gpu
@pytest.mark.parametrize("piece_bytes", [4096, 1 << 20])
def test_tensors_come_off_the_device_in_pieces(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(off_device, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(off_device, "MAX_PIECES", 3)
    tensors = {f"w{index}": torch.randn(257, 129, device="cuda").bfloat16() for index in range(40)}
    expected = {name: tensor.cpu() for name, tensor in tensors.items()}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    plan = plan_weight_files(shapes, torch.bfloat16, max_file_bytes=700_000)
    writer = ShardWriter(tmp_path, plan, shapes, torch.bfloat16)
    for name in list(tensors):
        tensor = tensors.pop(name)
        writer.add(name, tensor)
        tensor.zero_()  # later on the same stream, so it must not show
    writer.finish()
    write_index(tmp_path, plan, shapes, torch.bfloat16)
    for name, file in find_tensors(tmp_path).items():
        assert torch.equal(load_file(file)[name], expected[name])


def test_one_file_has_no_index(tmp_path):
    plan = plan_weight_files(SHAPES, torch.float32)
    write_index(tmp_path, plan, SHAPES, torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_a_writer_takes_its_own_files_only(tmp_path):
    plan = plan_weight_files(SHAPES, torch.float32, max_file_bytes=28)
    writer = ShardWriter(tmp_path, plan, SHAPES, torch.float32, [plan["c"]])
    assert [name for name in SHAPES if writer.takes(name)] == ["c"]
    writer.add("c", torch.zeros(9))
    writer.finish()
    assert [file.name for file in tmp_path.iterdir()] == [plan["c"]]


def test_a_file_of_empty_tensors_is_on_the_disk(tmp_path, monkeypatch):
    empty = {"a": torch.Size([0, 4]), "b": torch.Size([0])}
    flushed, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(fsync(descriptor)))
    writer = ShardWriter(tmp_path, plan_weight_files(empty, torch.float32), empty, torch.float32)
    for name, shape in empty.items():
        writer.add(name, torch.zeros(shape))
    writer.finish()
    assert len(flushed) == 1
    loaded = load_file(tmp_path / "model.safetensors")
    assert {name: tensor.shape for name, tensor in loaded.items()} == empty


@pytest.mark.parametrize("added", [[], ["a"], ["a", "b"]])
def test_a_file_with_gaps_is_no_success(tmp_path, added):
    plan = plan_weight_files(SHAPES, torch.float32, max_file_bytes=28)
    writer = ShardWriter(tmp_path, plan, SHAPES, torch.float32)
    for name in added:
        writer.add(name, torch.zeros(SHAPES[name]))
    with pytest.raises(AssertionError, match="too few"):
        writer.finish()


def test_a_failed_write_comes_out_at_the_end(tmp_path):
    big = {"a": torch.Size([4096])}
    writer = ShardWriter(tmp_path, plan_weight_files(big, torch.float32), big, torch.float32)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        writer.add("a", torch.zeros(4096))
        with pytest.raises(OSError, match="too large"):
            writer.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.abandon()
