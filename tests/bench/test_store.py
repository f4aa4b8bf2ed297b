import os
import resource

import pytest

from fsdpbench.bench.records import SCHEMA_VERSION, Record, encode
from fsdpbench.bench.store import ResultWriter, StoreError, keep_latest, read_records

A, B = Record(id="a", status="ok"), Record(id="b", status="crashed", reason="x\ny")


def write_all(path, *records):
    writer = ResultWriter(path)
    for record in records:
        writer.append(record)
    writer.close()


def test_records_come_back_in_order(tmp_path):
    path = tmp_path / "deep" / "results.jsonl"
    write_all(path, A)
    write_all(path, B, A)
    result = read_records(path)
    assert result.records == [A, B, A]
    assert result.problems == []
    assert read_records(tmp_path / "none").records == []


def test_every_torn_length_of_the_last_line_is_survived_and_cut_off(tmp_path):
    path = tmp_path / "results.jsonl"
    line = encode(B).encode()
    for length in range(1, len(line), 7):
        path.write_bytes(encode(A).encode() + b"\n" + line[:length])
        result = read_records(path)
        assert result.records == [A]
        assert result.problems == [f"{path}:2: torn last line, skipped"]
        write_all(path, B)
        assert read_records(path).records == [A, B]
        assert read_records(path).problems == []


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text(encode(A))
    write_all(path, B)
    assert read_records(path).records == [A, B]


@pytest.mark.parametrize("damage", [b"\0" * 64, b"{}", b"garbage \xff", b"[1]"])
def test_a_damaged_line_in_the_middle_is_skipped_and_kept(tmp_path, damage):
    path = tmp_path / "results.jsonl"
    path.write_bytes(encode(A).encode() + b"\n" + damage + b"\n")
    write_all(path, B)
    result = read_records(path)
    assert result.records == [A, B]
    assert result.problems == [f"{path}:2: not a record, skipped"]
    assert damage in path.read_bytes(), "evidence is not destroyed"


def test_a_newer_schema_is_refused_by_line(tmp_path):
    path = tmp_path / "results.jsonl"
    write_all(path, Record(id="n", status="ok", schema_version=SCHEMA_VERSION + 1), A)
    result = read_records(path)
    assert result.records == [A]
    assert "is newer than" in result.problems[0]


def test_the_last_record_of_an_id_counts():
    again = Record(id="a", status="oom")
    assert keep_latest([A, B, again]) == [again, B]


@pytest.mark.parametrize("room", [0, 1, 50])
def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, room):
    path = tmp_path / "results.jsonl"
    write_all(path, A)
    before = path.read_bytes()
    writer = ResultWriter(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + room, limits[1]))
    try:
        with pytest.raises(StoreError, match=r"File too large.*--resume"):
            writer.append(B)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    writer.append(B)
    writer.close()
    assert read_records(path).records == [A, B]


def test_a_folder_in_the_files_place_is_an_error(tmp_path):
    with pytest.raises(StoreError, match="Is a directory"):
        ResultWriter(tmp_path)
    with pytest.raises(StoreError, match="cannot be read"):
        read_records(tmp_path)


def test_the_file_is_not_inherited_by_trials(tmp_path):
    writer = ResultWriter(tmp_path / "results.jsonl")
    assert not os.get_inheritable(writer._descriptor)
    writer.close()
