import os

import pytest

from fsdpbench.bench.folders import RunFolder, TrialFolder, write_atomically
from fsdpbench.bench.records import WorkerOutcome
from tests.bench.fakes import make_spec


def make_folder(tmp_path):
    folder = RunFolder(tmp_path).trial("abc")
    folder.create(make_spec({"x": 1}))
    return folder


def test_the_specification_and_the_outcome_come_back(tmp_path):
    folder = make_folder(tmp_path)
    assert folder.path == tmp_path / "trials" / "abc"
    assert folder.load_spec() == make_spec({"x": 1})
    assert folder.load_outcome() is None
    outcome = WorkerOutcome(losses=[float("inf")], tokens_per_second=3.0)
    folder.save_outcome(outcome)
    assert folder.load_outcome() == outcome


@pytest.mark.parametrize("content", [b"", b'{"status": "o', b'{"no": 1}', b"\xff\xfe"])
def test_an_outcome_that_is_none_reads_as_none(tmp_path, content):
    folder = make_folder(tmp_path)
    folder.outcome_path.write_bytes(content)
    assert folder.load_outcome() is None


def test_heartbeats_tell_rank_phase_and_time(tmp_path):
    folder = make_folder(tmp_path)
    folder.beat(10, "forward", 3)
    folder.beat(2, "load")
    os.utime(folder.heartbeats / "rank2", (5.0, 5.0))
    two, ten = folder.read_heartbeats()
    assert (two.rank, two.phase, two.step, two.unix_seconds) == (2, "load", None, 5.0)
    assert (ten.rank, ten.phase, ten.step) == (10, "forward", 3)


@pytest.mark.parametrize("content", ["", '{"phase": "forw', "[]", "3"])
def test_a_heartbeat_that_is_half_written_is_no_error(tmp_path, content):
    folder = make_folder(tmp_path)
    (folder.heartbeats / "rank0").write_text(content)
    assert all(beat.phase is None for beat in folder.read_heartbeats())
    (folder.heartbeats / "rankx").write_text("{}")
    assert TrialFolder(tmp_path / "nothing").read_heartbeats() == []


def test_an_atomic_write_leaves_the_old_file_or_the_new_one(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, "old")
    write_atomically(path, "new")
    assert path.read_text() == "new"
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "new"
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "missing" / "file", "x")
    assert path.read_text() == "new"


def test_a_write_that_fails_leaves_nothing(tmp_path):
    path = tmp_path / "a.json"
    write_atomically(path, "old")
    with pytest.raises(TypeError):
        write_atomically(path, None)
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
    assert path.read_text() == "old"
