"""The newest complete checkpoint, by the pointer or without it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from fsdpbench.engine.checkpoint.manifest import Manifest, list_files, write_manifest
from fsdpbench.engine.checkpoint.recover import find_latest, point_latest, resolve_checkpoint


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


def test_a_folder_called_latest_is_left_alone(tmp_path):
    (tmp_path / "latest").mkdir()
    point_latest(tmp_path / "step1")
    assert (tmp_path / "latest").is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
