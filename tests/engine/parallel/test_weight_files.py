"""Reading parts of safetensors folders, and what is said of broken ones."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from fsdpbench.engine.parallel.regions import plan_region
from fsdpbench.engine.parallel.weight_files import (
    SafetensorsWeights,
    describe_mismatch,
    find_tensors,
    read_header,
)
from fsdpbench.errors import CheckpointError

TENSORS = {
    "a": torch.arange(20.0).view(5, 4),
    "b": torch.arange(3.0, dtype=torch.bfloat16),
}


@pytest.fixture
def folder(tmp_path):
    for number, (name, tensor) in enumerate(TENSORS.items()):
        save_file({name: tensor}, tmp_path / f"part{number}.safetensors")
    weight_map = {"a": "part0.safetensors", "b": "part1.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_reads_regions_in_the_files_dtype(folder):
    source = SafetensorsWeights(folder)
    source.check_names({name: tensor.shape for name, tensor in TENSORS.items()})
    for name, tensor in TENSORS.items():
        for index in range(4):  # the last part of `b` is empty
            region = plan_region(tensor.shape, [(0, 4, index)])
            assert torch.equal(source.read(name, tensor.shape, region).to(tensor), tensor[region])
    assert source.read("b", torch.Size([3]), (slice(0, 3),)).dtype == torch.bfloat16
    assert source.read("a", torch.Size([5, 4]), (slice(1, 3), slice(2, 4))).tolist() == [
        [6.0, 7.0],
        [10.0, 11.0],
    ]


def test_one_file_needs_no_index(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert sorted(find_tensors(tmp_path)) == ["a", "b"]


def test_all_missing_and_misshapen_tensors_are_named_at_once(folder):
    shapes = {"a": torch.Size([4, 5]), "b": torch.Size([3]), "c": torch.Size([1])}
    with pytest.raises(CheckpointError, match=r"missing c; of another shape: a \(file \[5, 4\]"):
        SafetensorsWeights(folder).check_names(shapes)


def test_an_absent_file_of_the_index_is_named(folder):
    (folder / "part1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks part1.safetensors"):
        find_tensors(folder)


def test_a_folder_without_weights_says_what_to_do(tmp_path):
    with pytest.raises(CheckpointError, match="init_from_scratch"):
        find_tensors(tmp_path)


def test_a_broken_file_is_a_checkpoint_error(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"no tensors in here")
    with pytest.raises(CheckpointError, match="cannot be read"):
        find_tensors(tmp_path)


@pytest.mark.parametrize("cut", [4, 60])
def test_a_truncated_file_of_the_index_is_a_checkpoint_error(folder, cut):
    file = folder / "part1.safetensors"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match=r"part1.safetensors cannot be read"):
        SafetensorsWeights(folder).check_names({"b": torch.Size([3])})


def test_a_tensor_that_the_index_promises_and_the_file_lacks(folder):
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"c": "part0.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"part0.safetensors cannot be read.*c"):
        SafetensorsWeights(folder).check_names({"c": torch.Size([3])})


def test_quantized_tensors_are_refused(tmp_path):
    save_file({"a": torch.zeros(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"neither of F64, F32, F16, BF16: a \(I8\)"):
        SafetensorsWeights(tmp_path).check_names({"a": torch.Size([2])})


def test_unused_tensors_are_listed(folder):
    assert SafetensorsWeights(folder).find_unused({"a"}) == ["b"]


def test_one_file_comes_before_an_index_as_in_transformers(folder):
    save_file({"whole": torch.zeros(1)}, folder / "model.safetensors")
    assert list(find_tensors(folder)) == ["whole"]


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", "[" * 30_000, '{"weight_map": 3}', '{"weight_map": {"a": 1}}']
)
def test_a_broken_index_is_a_checkpoint_error(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read"):
        find_tensors(tmp_path)


def write_raw(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(dtype, shape, *offsets):
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"[1]", "no JSON object"),
        (b"{" * 30_000, "cannot be read"),
        (b'{"a": {}, "a": {}}', "twice"),
        (b"\xff\xfe", "cannot be read"),
        ({"a": 3}, "cannot be read"),
        ({"a": entry("F32", [2])}, "cannot be read"),
        ({"a": entry("F32", [2], 0, 4)}, "does not fit"),
        ({"a": entry("F32", [-2], 0, 8)}, "shape"),
        ({"a": entry("F32", [True], 0, 4)}, "shape"),
        ({"a": entry("F32", [2.0], 0, 8)}, "shape"),
        ({"a": entry("X9", [2], 0, 8)}, "unknown dtype 'X9'"),
        ({"a": entry(["F32"], [2], 0, 8)}, "cannot be read"),
        ({"a": entry("F32", [2], 8, 0)}, "does not fit"),
        ({"a": entry("F32", [1 << 70], 0, 1 << 72)}, "truncated"),
        ({"a": entry("F32", [1], 4, 8)}, "starts at byte"),
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 4, 8)}, "starts at byte"),
        ({"a": entry("F32", [1], 0, 4)}, "longer than its header says"),
    ],
)
def test_headers_that_do_not_fit_their_file_are_refused(header, said, tmp_path):
    file = tmp_path / "x.safetensors"
    write_raw(file, header, bytes(8))
    with pytest.raises(CheckpointError, match=said) as caught:
        read_header(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("length", [0, 1, 50, 1 << 40, (1 << 64) - 1])
def test_a_header_of_absurd_length_is_refused_before_it_is_read(length, tmp_path):
    file = tmp_path / "x.safetensors"
    file.write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match=r"no safetensors file, or only the start of one"):
        read_header(file)


def test_headers_say_what_safetensors_wrote(tmp_path):
    file = tmp_path / "x.safetensors"
    tensors = {**TENSORS, "empty": torch.zeros(0, 3), "number": torch.tensor(2.5)}
    save_file(tensors, file, metadata={"format": "pt"})
    found = read_header(file)
    content = file.read_bytes()
    for name, tensor in tensors.items():
        stored = found.pop(name)
        assert (stored.shape, stored.dtype) == (tensor.shape, tensor.dtype)
        part = content[stored.offset_bytes :][: stored.num_bytes]
        assert part == bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    assert found == {}


def test_a_number_is_read(tmp_path):
    save_file({"number": torch.tensor(2.5)}, tmp_path / "model.safetensors")
    assert SafetensorsWeights(tmp_path).read("number", torch.Size([]), ()) == 2.5


def test_an_index_does_not_lead_out_of_its_folder(folder):
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../part0.safetensors"}}))
    with pytest.raises(CheckpointError, match="names files elsewhere"):
        find_tensors(folder)


def test_mismatches_name_five_of_each_kind():
    expected = {f"w{i}": torch.Size([2]) for i in range(7)}
    found = {"w6": torch.Size([3]), **{f"x{i}": torch.Size([1]) for i in range(6)}}
    assert describe_mismatch(expected, found) == [
        "missing w0, w1, w2, w3, w4 and 1 more",
        "unexpected x0, x1, x2, x3, x4 and 1 more",
        "of another shape: w6 (file [3], model [2])",
    ]
    assert describe_mismatch(expected, expected) == []
