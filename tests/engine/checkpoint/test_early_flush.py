"""Files are flushed while they grow; nothing about it can fail a save."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdpbench.engine.checkpoint import early_flush
from fsdpbench.engine.checkpoint.early_flush import flushing_early


@pytest.fixture
def flushed(monkeypatch):
    names = []

    def note(descriptor):
        names.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    monkeypatch.setattr(early_flush, "POLL_SECONDS", 0.005)
    monkeypatch.setattr(os, "fdatasync", note)
    return names


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def test_own_files_are_flushed_again_and_again(tmp_path, flushed):
    (tmp_path / "__10_0.distcp").write_bytes(b"another rank")
    with flushing_early(tmp_path, "__1_"):
        for name in ("__1_0.distcp", "__1_1.distcp"):
            (tmp_path / name).write_bytes(b"values")
        assert wait_for(lambda: min(map(flushed.count, ("__1_0.distcp", "__1_1.distcp"))) > 2)
    assert set(flushed) == {"__1_0.distcp", "__1_1.distcp"}
    told = len(flushed)
    time.sleep(0.05)
    assert len(flushed) == told, "it ends with the block"


@pytest.mark.parametrize("place", ["absent", "."])
def test_faults_are_left_to_the_writer(tmp_path, monkeypatch, place):
    tries = []

    def fail(descriptor):
        tries.append(descriptor)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(early_flush, "POLL_SECONDS", 0.005)
    monkeypatch.setattr(os, "fdatasync", fail)
    (tmp_path / "__0_0.distcp").write_bytes(b"values")
    with flushing_early(tmp_path / place, "__0_"):
        if place == ".":
            assert wait_for(lambda: len(tries) > 1)
        else:
            time.sleep(0.05)
    assert bool(tries) == (place == ".")


def test_errors_of_the_block_pass(tmp_path):
    with pytest.raises(ValueError, match="of the block"), flushing_early(tmp_path, "__0_"):
        raise ValueError("of the block")


AT_EXIT = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fsdpbench.engine.checkpoint import early_flush


def save():
    with early_flush.flushing_early(Path(sys.argv[1]), "__0_"):
        time.sleep(0.3)


early_flush.POLL_SECONDS = 0.01
ThreadPoolExecutor(1).submit(save)
"""


def test_a_save_that_outlasts_the_program_is_quiet(tmp_path):
    (tmp_path / "__0_0.distcp").write_bytes(b"values")
    command = [sys.executable, "-c", AT_EXIT, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stderr) == (0, "")
