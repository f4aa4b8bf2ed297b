"""The worker process outlives nobody: it goes when its parent dies, even unnoticed."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from fsdpbench.engine.rollout.frames import encode_frame
from fsdpbench.engine.rollout.local_worker import Wire

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 60.0

# The parent starts an engine that generates for long, and a fork that keeps the parent's end of
# the socket pair open, so that no end of file tells of the parent's death.
PARENT = """
import os, sys, threading, time
from fsdpbench.engine.rollout.generation import SamplingSettings
from fsdpbench.engine.rollout.local import LocalEngine, LocalSettings
engine = LocalEngine(LocalSettings(sys.argv[1], "float32", timeout_seconds=60, num_threads=1))
engine.wait_until_ready()
assert "torch" not in sys.modules
settings = SamplingSettings(4000, stop_token_ids=())
threading.Thread(target=engine.generate, args=([[5]], settings), daemon=True).start()
fork = os.fork()
if fork:
    print(f'{{"engine": {engine.pid}, "fork": {fork}}}', flush=True)
time.sleep(600)
"""


def wait_until_gone(process):
    deadline = time.monotonic() + PATIENCE
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            os.sched_yield()


def test_a_killed_parent_leaves_no_worker(first_folder):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(first_folder)], stdout=subprocess.PIPE, cwd=ROOT
    )
    with parent:
        pids = json.loads(parent.stdout.readline())
        try:
            assert psutil.pid_exists(pids["engine"])
            parent.kill()
            parent.wait(PATIENCE)
            wait_until_gone(pids["engine"])
            assert psutil.pid_exists(pids["fork"])
        finally:
            os.kill(pids["fork"], signal.SIGKILL)


class BrokenService:
    def receive(self, message):
        raise KeyError("call")


@pytest.mark.parametrize(
    ("sent", "code"),
    [(b"", 0), (encode_frame({}), 1), (b"\xff" * 8, 1)],
    ids=["answers unread", "no call", "no frame"],
)
def test_whatever_ends_the_reading_ends_the_process(monkeypatch, sent, code):
    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(sent)
        Wire(ours).send({"result": "nobody reads this"})
        if not sent:
            theirs.close()  # Linux resets the other end then, instead of ending it
        with pytest.raises(SystemExit) as caught:
            Wire(ours).read_until_closed(BrokenService(), os.getppid())
    assert caught.value.code == code


class EchoService:
    def __init__(self, send):
        self.receive = send


def test_a_descriptor_beyond_1023_is_read(many_descriptors, monkeypatch):
    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 1100)) as high:
        theirs.sendall(encode_frame({"id": 1}))
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(SystemExit) as caught:
            Wire(high).read_until_closed(EchoService(Wire(high).send), os.getppid())
        assert theirs.recv(100) == encode_frame({"id": 1})
    assert caught.value.code == 0
