"""Versions in folders: announced whole or not at all, cleaned, and never at the cost of others."""

from __future__ import annotations

import errno
import json
import os
import threading

import pytest

from fsdpbench.engine.weight_sync.disk import (
    LIST_FILE,
    DiskChannel,
    await_version,
    folder_of,
    host_name,
    list_versions,
    remove_version,
)
from fsdpbench.errors import CheckpointError, WeightSyncError
from tests.distributed.pool import run_on_ranks

PAYLOADS = "tests.distributed.payloads.weight_sync_disk"


def write(folder):
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "inner").mkdir()
    (folder / "inner" / "extra").write_bytes(b"x")


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_versions_are_announced_whole_and_cleaned(tmp_path):
    channel = DiskChannel(tmp_path / "weights", keep_versions=2)
    seen_while_writing = []

    def watch(folder):
        write(folder)
        seen_while_writing.append(names_in(channel.path)[-1:])
        assert list_versions(channel.path) == [] or folder not in list_versions(channel.path)

    for version in (7, 8, 9):
        folder = channel.publish(version, watch)
        await_version(folder, 0, version)
    assert seen_while_writing[1:] == [["v00000007"], ["v00000008"]]
    assert names_in(channel.path) == ["v00000008", "v00000009"]
    assert list_versions(channel.path)[-1] == folder == channel.path / "v00000009"


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), CheckpointError("a shard is missing.")],
    ids=["full disk", "writer"],
)
def test_a_failed_write_leaves_the_old_version(tmp_path, error):
    channel = DiskChannel(tmp_path)
    channel.publish(1, write)

    def fail(folder):
        write(folder)
        raise error

    with pytest.raises(WeightSyncError) as caught:
        channel.publish(2, fail)
    words = str(caught.value)
    assert "version 2 could not be written" in words
    assert "v00000001 stays as it was" in words
    assert ("No space" in words) == isinstance(error, OSError)
    assert names_in(tmp_path) == ["v00000001"]
    await_version(folder_of(tmp_path, 1), 0, 1)
    await_version(channel.publish(2, write), 0, 2)


def test_a_disk_without_room_is_seen_before_the_first_byte(tmp_path):
    def refuse(folder):
        raise AssertionError("nothing is to be written")

    with pytest.raises(WeightSyncError, match=r"no space left: .* are needed"):
        DiskChannel(tmp_path).publish(0, refuse, num_bytes=1 << 60)
    with pytest.raises(WeightSyncError, match="nothing was written"):
        DiskChannel(tmp_path).publish(0, lambda folder: None)


def test_an_unwritable_path_is_an_error_of_ours(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(WeightSyncError, match="no older version is there"):
        DiskChannel(tmp_path / "file").publish(0, write)


def test_a_version_can_be_written_again(tmp_path):
    channel = DiskChannel(tmp_path)
    channel.publish(3, write)
    folder = channel.publish(3, lambda folder: (folder / "other").write_text("new"))
    assert names_in(folder) == ["other", LIST_FILE]


def test_folders_of_others_are_never_touched(tmp_path):
    foreign = folder_of(tmp_path, 0)
    foreign.mkdir()
    (foreign / "mine").write_text("x")
    channel = DiskChannel(tmp_path, keep_versions=1)
    with pytest.raises(WeightSyncError, match="was not written by a weight update"):
        channel.publish(0, write)
    folder = channel.publish(1, write)
    (folder / "notes").write_text("mine, too")
    channel.publish(2, write)
    assert names_in(foreign) == ["mine"]
    assert names_in(folder) == ["notes"]
    assert list_versions(tmp_path) == [folder_of(tmp_path, 2)]
    listing = json.dumps({"files": {"../v00000000/mine": 1}})
    (folder / LIST_FILE).write_text(listing)
    remove_version(folder)
    assert names_in(foreign) == ["mine"]


def test_leftovers_of_dead_trainers_are_removed(tmp_path):
    dead = tmp_path / f".v00000001.{host_name()}.999999999.partial"
    alive = tmp_path / f".v00000001.{host_name()}.{os.getppid()}.partial"
    elsewhere = tmp_path / ".v00000001.another_host.1.partial"
    for folder in (dead, alive, elsewhere):
        folder.mkdir()
    DiskChannel(tmp_path).publish(5, write)
    assert not dead.exists()
    assert alive.exists()
    assert elsewhere.exists()


def test_readers_wait_for_what_they_see_late(tmp_path):
    folder = DiskChannel(tmp_path).publish(4, write)
    late = folder / "model.safetensors"
    content = late.read_bytes()
    late.unlink()
    with pytest.raises(WeightSyncError, match=r"model\.safetensors is missing or incomplete"):
        await_version(folder, 0.1, 4)
    timer = threading.Timer(0.1, late.write_bytes, [content])
    timer.start()
    await_version(folder, 30, 4)
    timer.join()


@pytest.mark.parametrize(
    ("name", "version", "words"),
    [
        ("v00000009", 9, "there is no such folder"),
        ("v00000004", 5, "it is version 4, and 5 was asked for"),
        ("v00000006", 6, f"it has no {LIST_FILE}"),
    ],
)
def test_what_was_not_announced_is_not_read(tmp_path, name, version, words):
    DiskChannel(tmp_path).publish(4, write)
    folder_of(tmp_path, 6).mkdir()
    with pytest.raises(WeightSyncError, match=words):
        await_version(tmp_path / name, 0, version)


def test_a_plain_folder_needs_no_announcement(tmp_path):
    write(tmp_path)
    await_version(tmp_path, 0, 3)


def test_ranks_write_and_fail_together(tmp_path):
    first, second = run_on_ranks(f"{PAYLOADS}:publish", 2, timeout_seconds=60, path=str(tmp_path))
    assert first[::2] == second[::2] == ["v00000000", "v00000002"]
    assert first[1].startswith("PeerError")
    assert "No space left on device" in first[1]
    assert second[1].startswith("WeightSyncError")
    assert names_in(tmp_path) == ["v00000000", "v00000002"]
    assert names_in(tmp_path / "v00000002") == ["part0", "part1", LIST_FILE]


def test_a_disk_that_is_not_shared_is_told(tmp_path):
    said = run_on_ranks(f"{PAYLOADS}:publish_unshared", 2, timeout_seconds=60, path=str(tmp_path))
    assert all("rank 0 does not see part of disk1" in words for words in said)
    assert list_versions(tmp_path) == []
