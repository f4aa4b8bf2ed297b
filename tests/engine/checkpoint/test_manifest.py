"""What a finished checkpoint says of itself."""

from __future__ import annotations

import json

import pytest

from fsdpbench.engine.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    is_intact,
    list_files,
    read_manifest,
    write_manifest,
)
from fsdpbench.errors import CheckpointError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "b").write_bytes(b"12345")
    (tmp_path / "a").write_bytes(b"123")
    write_manifest(tmp_path, Manifest("dcp", 4, True, 2, list_files(tmp_path)))
    return tmp_path


def test_a_manifest_comes_back_as_it_was_written(folder):
    assert read_manifest(folder) == Manifest("dcp", 4, True, 2, {"a": 3, "inner/b": 5})
    assert is_intact(folder)
    (folder / "inner" / "b").write_bytes(b"1234")
    assert not is_intact(folder)


def test_folders_of_others_have_none(tmp_path):
    assert read_manifest(tmp_path) is None
    assert read_manifest(tmp_path / "absent") is None
    assert not is_intact(tmp_path)


def test_json_nested_too_deep_is_refused(folder):
    (folder / MANIFEST_FILE).write_text("[" * 30_000)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"files": {"../other": 1}}, "names a file elsewhere"),
        ({"files": {"/etc/hosts": 1}}, "names a file elsewhere"),
        ({"files": {"": 1}}, "names a file elsewhere"),
        ({"files": {"a\0b": 1}}, "names a file elsewhere"),
        ({"files": {MANIFEST_FILE: 1}}, "names a file elsewhere"),
        ({"files": {"a": float("inf")}}, "cannot be read"),
        ({"world_size": "all"}, "cannot be read"),
        ({"files": 3}, "cannot be read"),
        ({"version": "new"}, "cannot be read"),
        ({"schema_version": 9}, "schema_version=9"),
        ({"mood": "good"}, "cannot be read"),
    ],
)
def test_senseless_manifests_are_refused(folder, change, said):
    file = folder / MANIFEST_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=said):
        read_manifest(folder)
    assert not is_intact(folder)
