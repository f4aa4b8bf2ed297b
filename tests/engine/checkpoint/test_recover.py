"""The newest complete checkpoint, by the pointer or without it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fsdpbench.engine.checkpoint.manifest import Manifest, list_files, write_manifest
from fsdpbench.engine.checkpoint.recover import find_latest, point_latest, resolve_checkpoint
from fsdpbench.errors import CheckpointError
from tests.distributed.pool import run_on_ranks


@pytest.fixture
def checkpoints(tmp_path):
    """Three Hugging Face checkpoints, the pointer at the second."""
    for version in range(3):
        folder = tmp_path / f"step{version}"
        folder.mkdir()
        save_file({"a": torch.zeros(4)}, folder / "model.safetensors")
        write_manifest(folder, Manifest("hf", version, False, 1, list_files(folder)))
    point_latest(tmp_path / "step1")
    return tmp_path


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def test_the_pointer_decides(checkpoints):
    assert find_latest(checkpoints) == checkpoints / "step1"
    assert find_latest(checkpoints, "hf") == checkpoints / "step1"
    assert find_latest(checkpoints, "dcp") is None
    assert not list(checkpoints.glob(".*"))


@pytest.mark.parametrize("text", [None, "", "step7", "../step1", "..", "step1/x"])
def test_without_a_sensible_pointer_the_highest_version_is_taken(checkpoints, text):
    (checkpoints / "latest").unlink()
    if text is not None:
        (checkpoints / "latest").write_text(text)
    assert find_latest(checkpoints) == checkpoints / "step2"


def test_incomplete_checkpoints_are_skipped(checkpoints):
    truncate(checkpoints / "step1")
    assert find_latest(checkpoints) == checkpoints / "step2"
    truncate(checkpoints / "step2")
    assert find_latest(checkpoints) == checkpoints / "step0"
    truncate(checkpoints / "step0")
    assert find_latest(checkpoints) is None


def test_there_may_be_none(tmp_path):
    assert find_latest(tmp_path) is None
    assert find_latest(tmp_path / "absent") is None


def test_a_path_means_a_checkpoint_or_the_latest_inside(checkpoints):
    assert resolve_checkpoint(checkpoints / "step0", "hf") == checkpoints / "step0"
    assert resolve_checkpoint(checkpoints, "hf") == checkpoints / "step1"
    assert resolve_checkpoint(checkpoints / "absent", "hf") == checkpoints / "absent"


@pytest.mark.parametrize("kind", ["folder", "link", "notes"])
def test_something_else_called_latest_is_left_alone(tmp_path, kind):
    pointer = tmp_path / "latest"
    if kind == "folder":
        pointer.mkdir()
    elif kind == "link":
        pointer.symlink_to("step0")  # as other programs have it; its folder may be gone
    else:
        pointer.write_text("what I saw today\n" * 100)
    before = pointer.lstat()
    point_latest(tmp_path / "step1")
    assert pointer.lstat() == before
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


def test_engines_of_one_process_may_point_at_the_same_time(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: point_latest(tmp_path / f"step{number}"), range(40)))
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
    assert (tmp_path / "latest").read_text().startswith("step")


def test_a_pointer_that_cannot_be_written_leaves_the_checkpoint_saved(tmp_path, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise OSError("no more")

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(CheckpointError, match=r"step1 is saved, but .*latest cannot be written"):
        point_latest(tmp_path / "step1")
    assert not list(tmp_path.iterdir())


def test_all_ranks_load_what_rank_0_finds(tmp_path):
    payload = "tests.distributed.payloads.checkpoint_transaction:resolve_differently"
    results = run_on_ranks(payload, 2, folder=str(tmp_path), timeout_seconds=60)
    assert results == [str(tmp_path / "0")] * 2
