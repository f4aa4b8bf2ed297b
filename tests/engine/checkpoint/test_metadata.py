"""A table is read without running what it says."""

from __future__ import annotations

import os
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint

from fsdpbench.engine.checkpoint.metadata import CheckedPlanner, CheckedReader, read_metadata
from fsdpbench.errors import CheckpointError

CONTENT = {
    "a": torch.arange(6.0).view(2, 3),
    "b": {"c": torch.ones(5, dtype=torch.bfloat16), "d": "text", "e": (0.9, [1, None])},
}


class Harmful:
    def __reduce__(self):
        return os.system, ("touch harm",)


def save(folder, content):
    with warnings.catch_warnings(action="ignore"):  # torch warns of the missing process group
        writer = torch_checkpoint.FileSystemWriter(folder, thread_count=2)
        torch_checkpoint.save(content, storage_writer=writer)


def load(folder, content):
    with warnings.catch_warnings(action="ignore"):
        reader = CheckedReader(folder, read_metadata(folder))
        torch_checkpoint.load(content, storage_reader=reader, planner=CheckedPlanner())


def test_values_come_back(tmp_path):
    save(tmp_path, CONTENT)
    found = {
        "a": torch.zeros(2, 3),
        "b": {"c": torch.zeros(5, dtype=torch.bfloat16), "d": "", "e": None},
    }
    load(tmp_path, found)
    assert torch.equal(found["a"], CONTENT["a"])
    assert torch.equal(found["b"]["c"], CONTENT["b"]["c"])
    assert found["b"]["d"] == "text"
    assert found["b"]["e"] == (0.9, [1, None])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (pickle.dumps(Harmful()), "it asks for posix.system"),
        (pickle.dumps({"a": 1}), "holds no table"),
        (b"", "is damaged"),
        (b"\x80\x04garbage", "is damaged"),
        (b"not a pickle", "is damaged"),
    ],
    ids=["harmful", "other pickle", "empty", "garbage", "text"],
)
def test_other_contents_are_refused(tmp_path, monkeypatch, content, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=said):
        read_metadata(tmp_path)
    assert not (tmp_path / "harm").exists()


def test_every_cut_of_a_table_is_refused(tmp_path):
    save(tmp_path, CONTENT)
    file = tmp_path / ".metadata"
    content = file.read_bytes()
    for length in range(0, len(content), 7):
        file.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_metadata(tmp_path)


def test_a_missing_table_says_that_it_is_written_last(tmp_path):
    with pytest.raises(CheckpointError, match=r"lacks \.metadata, which is written last"):
        read_metadata(tmp_path)


def test_values_that_are_no_plain_types_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "saved", {"a": Harmful()})
    (tmp_path / "harm").unlink(missing_ok=True)
    with pytest.raises(BaseException, match="a of the checkpoint is no plain value"):
        load(tmp_path / "saved", {"a": None})
    assert not (tmp_path / "harm").exists()
