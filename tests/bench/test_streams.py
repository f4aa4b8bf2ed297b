import io
import os
import sys

import pytest

from fsdpbench.bench.streams import flush_streams, guard_streams, open_patient


def make_pipe():
    read_end, write_end = os.pipe()
    return read_end, os.fdopen(write_end, "w", encoding="ascii")


def test_a_reader_that_goes_breaks_nothing():
    read_end, stream = make_pipe()
    patient = open_patient(stream)
    patient.write("one\n")
    patient.flush()
    assert os.read(read_end, 10) == b"one\n"
    os.close(read_end)
    for _ in range(3):
        patient.write("two\n" * 100_000)
        patient.flush()
    patient.close()
    stream.close()


def test_what_the_encoding_lacks_is_escaped():
    read_end, stream = make_pipe()
    patient = open_patient(stream)
    patient.write("\u2501 \udcff\n")
    patient.flush()
    assert os.read(read_end, 100) == b"\\u2501 \\udcff\n"
    patient.close()
    stream.close()
    os.close(read_end)


def test_a_full_disk_is_said_once(monkeypatch):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "stderr", None)
        guard_streams()
        sys.stdout.write("x")
        lost = sys.stdout
        with pytest.raises(OSError, match="No space"):
            flush_streams()
        flush_streams()
        with pytest.raises(OSError, match="No space"):
            lost.close()


def test_closed_streams_stay_closed(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys, "stderr", None)
    guard_streams()
    flush_streams()
    assert sys.stdout is None
