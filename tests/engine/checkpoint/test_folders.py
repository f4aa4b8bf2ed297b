"""A folder's kind, and what a load of another kind is told."""

from __future__ import annotations

import pytest

from fsdpbench.engine.checkpoint.folders import FolderKind, check_kind, classify_folder
from fsdpbench.errors import CheckpointError


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        ([], FolderKind.EMPTY),
        (["notes.txt"], FolderKind.OTHER),
        ([".metadata", "__0_0.distcp"], FolderKind.DCP),
        (["__0_0.distcp"], FolderKind.DCP),
        (["config.json", "model.safetensors"], FolderKind.HF),
        (["model.safetensors.index.json"], FolderKind.HF),
        (["model-00001-of-00002.safetensors"], FolderKind.HF),
        (["adapter_config.json", "adapter_model.safetensors"], FolderKind.ADAPTER),
    ],
    ids=str,
)
def test_files_tell_the_kind(tmp_path, names, kind):
    for name in names:
        (tmp_path / name).touch()
    assert classify_folder(tmp_path) is kind


def test_what_is_no_folder(tmp_path):
    assert classify_folder(tmp_path / "absent") is FolderKind.ABSENT
    (tmp_path / "file").touch()
    assert classify_folder(tmp_path / "file") is FolderKind.OTHER


def test_another_format_is_named_with_the_remedy(tmp_path):
    (tmp_path / ".metadata").touch()
    check_kind(tmp_path, "dcp")
    with pytest.raises(
        CheckpointError, match=r"sharded checkpoint of torch.*Set weight_format to d"
    ):
        check_kind(tmp_path, "hf")
    with pytest.raises(CheckpointError, match="no such folder"):
        check_kind(tmp_path / "absent", "hf")
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError, match=r"an empty folder.*Correct the path"):
        check_kind(tmp_path / "other", "adapter")
