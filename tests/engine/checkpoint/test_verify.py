"""Each defect of a checkpoint has its own error, found before anything is loaded."""

from __future__ import annotations

import json
import pickle
import re
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from safetensors.torch import save_file

from fsdpbench.engine.checkpoint.metadata import read_metadata
from fsdpbench.engine.checkpoint.verify import (
    check_dcp,
    check_entries,
    check_folder,
    list_shapes,
)
from fsdpbench.errors import CheckpointError

CONTENT = {"m": {f"w{index}": torch.zeros(index + 1, 8) for index in range(8)}, "text": "x"}
SHAPES = {name: tensor.shape for name, tensor in CONTENT["m"].items()}


@pytest.fixture
def dcp(tmp_path):
    with warnings.catch_warnings(action="ignore"):  # torch warns of the missing process group
        writer = torch_checkpoint.FileSystemWriter(tmp_path / "dcp", thread_count=2)
        torch_checkpoint.save(CONTENT, storage_writer=writer)
    return tmp_path / "dcp"


@pytest.fixture
def hf(tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    names = {}
    for number in (1, 2):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({f"w{number}": torch.zeros(16)}, folder / file)
        names[f"w{number}"] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def test_complete_checkpoints_pass(dcp, hf):
    check_folder(dcp, "dcp")
    check_folder(hf, "hf")


def test_a_missing_data_file_is_named(dcp):
    (dcp / "__0_1.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"lacks __0_1\.distcp, which \.metadata names"):
        check_dcp(dcp)


def test_a_truncated_data_file_is_named_with_its_size(dcp):
    file = dcp / "__0_0.distcp"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    said = rf"truncated __0_0\.distcp \({size - 1} bytes, should be {size}\)"
    with pytest.raises(CheckpointError, match=said):
        check_dcp(dcp)


def test_a_table_with_unplaced_tensors_is_refused(dcp):
    metadata = read_metadata(dcp)
    lost = next(index for index in metadata.storage_data if index.fqn == "m.w3")
    del metadata.storage_data[lost]
    with (dcp / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)
    with pytest.raises(CheckpointError, match=r"says of no file that it holds m\.w3"):
        check_dcp(dcp)


def drop_a_piece(metadata):
    del metadata.state_dict_metadata["m.w3"].chunks[0]


def move_a_piece(metadata):
    chunk = metadata.state_dict_metadata["m.w3"].chunks[0]
    metadata.state_dict_metadata["m.w3"].chunks[0] = replace(chunk, offsets=torch.Size([2, 0]))


def set_place(**fields):
    def change(metadata):
        index = next(index for index in metadata.storage_data if index.fqn == "m.w3")
        metadata.storage_data[index] = replace(metadata.storage_data[index], **fields)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop_a_piece, "the pieces of m.w3 are not the whole of it"),
        (move_a_piece, "a piece of m.w3 lies outside of it"),
        (set_place(offset=-8), "m.w3 has sizes or places that are no counts"),
        (set_place(length=1.5), "m.w3 has sizes or places that are no counts"),
        (set_place(length=1 << 62), "truncated"),
        (set_place(relative_path=7), "m.w3 lies in 7"),
        (set_place(relative_path="../other"), "names a file elsewhere"),
        (set_place(relative_path="/etc/hosts"), "names a file elsewhere"),
        (set_place(relative_path=".."), "lacks"),
        (lambda metadata: vars(metadata).clear(), "no attribute"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(dcp, change, said):
    metadata = read_metadata(dcp)
    change(metadata)
    with (dcp / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        check_dcp(dcp)


def test_a_missing_table_is_an_incomplete_save(dcp):
    (dcp / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"lacks \.metadata"):
        check_dcp(dcp)


def test_equal_entries_pass(dcp):
    metadata = check_dcp(dcp)
    assert list_shapes(metadata, "m.") == SHAPES
    check_entries(dcp, metadata, "weights", "m.", SHAPES)


@pytest.mark.parametrize(
    ("expected", "said"),
    [
        (
            SHAPES | {f"x{index}": torch.Size([1]) for index in range(7)},
            "weights: missing x0, x1, x2, x3, x4 and 2 more. The",
        ),
        ({"w0": SHAPES["w0"]}, "weights: unexpected w1, w2, w3, w4, w5 and 2 more (in __0_"),
        (
            SHAPES | {"w1": torch.Size([9])},
            "weights: of another shape: w1 (file [2, 8], model [9]) (in __0_",
        ),
    ],
    ids=["missing", "unexpected", "mis-shaped"],
)
def test_other_entries_are_named(dcp, expected, said):
    with pytest.raises(CheckpointError, match=re.escape(said)):
        check_entries(dcp, check_dcp(dcp), "weights", "m.", expected)


def test_files_of_a_hugging_face_folder(hf):
    file = hf / "model-00002-of-00002.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=r"00002-of-00002.safetensors .*truncated"):
        check_folder(hf, "hf")
    file.write_bytes(content[:12])
    with pytest.raises(CheckpointError, match="only the start of one"):
        check_folder(hf, "hf")
    save_file({"other": torch.zeros(16)}, file)
    with pytest.raises(CheckpointError, match="lacks w2, which the index names"):
        check_folder(hf, "hf")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-00002\.safetensors"):
        check_folder(hf, "hf")
    (hf / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read"):
        check_folder(hf, "hf")


def test_files_of_an_adapter_folder(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"lacks adapter_model\.safetensors"):
        check_folder(tmp_path, "adapter")
    save_file({"a": torch.zeros(2)}, tmp_path / "adapter_model.safetensors")
    check_folder(tmp_path, "adapter")
