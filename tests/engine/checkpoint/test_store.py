"""Folders appear whole; nothing of others is touched; dead saves are cleared away."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdpbench.engine.checkpoint import store
from fsdpbench.engine.checkpoint.manifest import MANIFEST_FILE, Manifest, list_files, write_manifest
from fsdpbench.errors import CheckpointError


@pytest.fixture(scope="module")
def dead_process():
    """The id of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(60)
    return child.pid


@pytest.fixture(params=[True, False], ids=["exchange", "two renames"])
def any_file_system(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(store, "exchange", lambda first, second: False)


def save(target, content):
    partial = store.open_partial(target)
    (partial / "inner").mkdir()
    (partial / "inner" / "data").write_text(content)
    store.publish(partial, target, Manifest("dcp", 1, False, 1, list_files(partial)))


def leave(target, process, state, content, with_manifest=True, host=None):
    """Make what a save of another process left."""
    name = f".{target.name}.{host or store.host_name()}.{process}-0.{state}"
    folder = target.with_name(name)
    folder.mkdir(parents=True)
    (folder / "data").write_text(content)
    if with_manifest:
        write_manifest(folder, Manifest("dcp", 1, False, 1, list_files(folder)))
    return folder


def test_a_newer_checkpoint_takes_the_place_of_the_older(tmp_path, any_file_system):
    target = tmp_path / "deep" / "saved"
    for content in ("old", "new"):
        save(target, content)
        assert (target / "inner" / "data").read_text() == content
        assert [path.name for path in target.parent.iterdir()] == ["saved"]


def test_an_empty_folder_may_be_the_target(tmp_path, any_file_system):
    target = tmp_path / "saved"
    target.mkdir()
    save(target, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_files_that_were_added_are_kept_save_after_save(tmp_path, any_file_system, caplog):
    target = tmp_path / "saved"
    save(target, "first")
    for content in ("second", "third", "fourth"):
        (target / "notes.txt").write_text(content)
        save(target, content)
    assert (target / "inner" / "data").read_text() == "fourth"
    kept = list(tmp_path.glob(".*"))
    assert [[path.name for path in folder.iterdir()] for folder in kept] == [["notes.txt"]] * 3
    assert {(folder / "notes.txt").read_text() for folder in kept} == {"second", "third", "fourth"}
    assert "notes.txt" in caplog.text


def refuse(*_args, **_kwargs):
    raise OSError("no more")


def test_an_exchanged_folder_is_no_rubbish_when_the_save_ends_badly(tmp_path, monkeypatch):
    target = tmp_path / "saved"
    save(target, "old")
    (target / "notes.txt").write_text("mine")
    partial = store.open_partial(target)
    (partial / "data").write_text("new")
    assert store.exchange(partial, target)  # and the process was stopped
    store.close_partial(partial, target)
    assert (target / "data").read_text() == "new"
    assert [path.read_text() for path in tmp_path.glob(".*/notes.txt")] == ["mine"]


def test_an_old_checkpoint_that_cannot_be_removed_fails_no_save(tmp_path, monkeypatch, caplog):
    target = tmp_path / "saved"
    save(target, "old")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        save(target, "new")
    assert "cannot be removed: no more" in caplog.text
    assert (target / "inner" / "data").read_text() == "new"
    save(target, "newer")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]  # this one could


def test_a_failed_second_rename_is_taken_back(tmp_path, monkeypatch):
    target = tmp_path / "saved"
    save(target, "old")
    partial = store.open_partial(target)
    monkeypatch.setattr(store, "exchange", lambda first, second: False)
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda p, to: refuse() if p == partial else rename(p, to))
    with pytest.raises(CheckpointError, match="no more"):
        store.publish(partial, target, Manifest("dcp", 1, False, 1))
    assert (target / "inner" / "data").read_text() == "old"


def test_two_saves_of_one_process_do_not_meet(tmp_path):
    target = tmp_path / "saved"
    first = store.open_partial(target)
    (first / "data").write_text("first")
    second = store.open_partial(target)
    (second / "data").write_text("second")
    for partial in (second, first):
        store.publish(partial, target, Manifest("dcp", 1, False, 1, list_files(partial)))
        store.close_partial(partial, target)
    assert (target / "data").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_link_out_of_an_old_checkpoint_is_not_followed(tmp_path):
    target, elsewhere = tmp_path / "saved", tmp_path / "elsewhere"
    save(target, "old")
    (target / "inner").rename(elsewhere)
    (target / "inner").symlink_to(elsewhere)
    save(target, "new")
    assert (elsewhere / "data").read_text() == "old"


def test_no_save_goes_into_a_checkpoint_or_onto_a_mounted_file_system(tmp_path):
    save(tmp_path / "saved", "old")
    with pytest.raises(CheckpointError, match=r"is inside the checkpoint .*saved, whose next save"):
        store.open_partial(tmp_path / "saved" / "deep" / "more")
    with pytest.raises(CheckpointError, match="a file system is mounted"):
        store.open_partial(Path("/proc"))
    assert not (tmp_path / "saved" / "deep").exists()


def test_a_path_is_absolute_and_its_links_are_followed(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path)
    assert store.resolve_path("link/saved") == tmp_path / "real" / "saved"
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(CheckpointError, match="leads nowhere"):
        store.resolve_path("circle/saved")


def test_what_is_not_ours_is_refused(tmp_path):
    target = tmp_path / "saved"
    target.mkdir()
    (target / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"not saved by this engine.*Give another path"):
        store.open_partial(target)
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        with pytest.raises(CheckpointError):
            store.open_partial(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "saved"]


def test_something_that_came_meanwhile_is_not_replaced(tmp_path):
    target = tmp_path / "saved"
    partial = store.open_partial(target)
    target.mkdir()
    (target / "notes.txt").touch()
    with pytest.raises(CheckpointError, match="not saved by this engine"):
        store.publish(partial, target, Manifest("dcp", 1, False, 1))
    assert (target / "notes.txt").exists()


def test_leftovers_of_dead_processes_of_this_host_go(tmp_path, dead_process):
    target = tmp_path / "saved"
    save(target, "old")
    half = leave(target, dead_process + 1, "partial", "half", with_manifest=False)
    (half / MANIFEST_FILE).write_text("{")  # a kill may fall within this write, too
    gone = [
        half,
        leave(target, dead_process, "partial", "half", with_manifest=False),
        leave(target, dead_process, "retired", "older"),
    ]
    kept = [
        leave(target, os.getppid(), "partial", "half", with_manifest=False),
        leave(target, dead_process, "partial", "half", host="elsewhere"),
        leave(tmp_path / "saved2", dead_process, "partial", "half"),
        leave(target, dead_process + 1, "retired", "foreign", host="elsewhere"),
    ]
    save(target, "new")
    assert not any(folder.exists() for folder in gone)
    assert all((folder / "data").exists() for folder in kept)


def test_a_checkpoint_between_two_renames_comes_back(tmp_path, dead_process):
    target = tmp_path / "saved"
    leave(tmp_path / "saved.x", dead_process, "retired", "of another")
    assert not store.restore_retired(target)
    retired = leave(target, dead_process, "retired", "old")
    leave(target, dead_process, "partial", "new")
    assert store.restore_retired(target)
    assert (target / "data").read_text() == "old"
    assert not retired.exists()
    assert not store.restore_retired(target)


def test_half_a_checkpoint_does_not_come_back(tmp_path, dead_process):
    retired = leave(tmp_path / "saved", dead_process, "retired", "old")
    (retired / "data").unlink()
    assert not store.restore_retired(tmp_path / "saved")


def test_removing_spares_folders_without_a_manifest(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "data").touch()
    store.remove_checkpoint(tmp_path / "other")
    store.remove_checkpoint(tmp_path / "absent")
    assert (tmp_path / "other" / "data").exists()
    assert not (tmp_path / "other" / MANIFEST_FILE).exists()
