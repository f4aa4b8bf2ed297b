"""A child process that answers calls over a socket pair; each call is a Future with a deadline.

One thread reads answers and watches deadlines. When the child dies, every open call fails with how
it ended and the last lines of its standard error. The child leads a session of its own and is ended
with all processes in it.
"""

from __future__ import annotations

import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fsdpbench.engine.rollout.frames import FrameDecoder, encode_frame
from fsdpbench.errors import WorkerError

CHUNK_BYTES = 1 << 16
POLL_SECONDS = 0.01
LOOK_SECONDS = 0.5  # how late a missed deadline may be noticed
END_SECONDS = 5.0  # a child whose connection is closed has this long to go by itself
TAIL_BYTES = 2000
# what a launcher told this process about itself, and is wrong in a child
LAUNCHER_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
LAUNCHER_PREFIXES = ("MASTER_PORT", "GROUP_", "ROLE_", "TORCHELASTIC_")

ErrorOf = Callable[[str, str], Exception]  # name and text of what the child raised


@dataclass(frozen=True)
class OpenCall:
    """A call without an answer yet."""

    name: str
    future: Future[Any]
    deadline: float
    timeout_seconds: float


class ChildProcess:
    """A running child and the calls to it; every thread may call."""

    def __init__(
        self,
        module: str,
        title: str,
        *,
        error_of: ErrorOf,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.title = title
        self._error_of = error_of
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the child
        self._connection, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(number), str(os.getpid())],
                env={**inherited_environment(), **(environment or {})},
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
            )
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # of the open calls and of what went wrong
        self._send_lock = threading.Lock()
        self._end_lock = threading.Lock()
        self._open: dict[int, OpenCall] = {}
        self._death: str | None = None
        self._reader = threading.Thread(target=self._read, name=f"{title} answers", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The child's process id, which is its group's, too."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the child can be called."""
        return self._death is None

    def call(self, name: str, timeout_seconds: float, **arguments: Any) -> Future[Any]:
        """Send a call; the Future ends with its answer, its error, or WorkerError when late."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # nobody can take the call back
        deadline = time.monotonic() + timeout_seconds
        number = next(self._numbers)
        frame = encode_frame({"id": number, "call": name, "arguments": arguments})
        with self._lock:
            if self._death is not None:
                future.set_exception(WorkerError(self._death))
                return future
            self._open[number] = OpenCall(name, future, deadline, timeout_seconds)
        try:
            with self._send_lock:
                self._connection.settimeout(timeout_seconds)
                self._connection.sendall(frame)
        except OSError:  # dead, or it does not read: either way the stream is of no use now
            self._kill()
        return future

    def close(self, grace_seconds: float = END_SECONDS) -> None:
        """End the child and whatever it started; open calls fail. Safe to call twice.

        It is killed if it has not gone by itself after the grace.
        """
        if not grace_seconds:
            self._kill()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # the child goes, and the reader wakes
        self._end(grace_seconds)
        self._reader.join(END_SECONDS)
        self._connection.close()
        self._log.close()

    def _read(self) -> None:
        try:
            self._read_answers()
        finally:
            self._bury()

    def _read_answers(self) -> None:
        decoder = FrameDecoder()
        poller = select.poll()  # select takes no descriptor beyond 1023
        poller.register(self._connection, select.POLLIN)
        while True:
            if not poller.poll(LOOK_SECONDS * 1000):
                self._fail_late_calls()
                continue
            try:
                received = self._connection.recv(CHUNK_BYTES)
                messages = list(decoder.feed(received))
            except OSError:
                received, messages = b"", []
            except ValueError:  # no frames: something else writes there, and nothing can be trusted
                self._kill()
                return
            if not received:
                return
            for message in messages:
                self._settle(message)
            self._fail_late_calls()

    def _settle(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            call = self._open.pop(message["id"], None)
        if call is None:
            return  # it was late
        if "error" in message:
            call.future.set_exception(self._error_of(message["error"], message["text"]))
        else:
            call.future.set_result(message["result"])

    def _fail_late_calls(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [number for number, call in self._open.items() if call.deadline < now]
            calls = [self._open.pop(number) for number in late]
        for call in calls:
            call.future.set_exception(
                WorkerError(
                    f"{self.title} (process {self.pid}) did not answer {call.name} within "
                    f"{call.timeout_seconds:g} s. It is stuck or overloaded: see what it waits "
                    "for, raise timeout_seconds, or close it and start another."
                )
            )

    def _bury(self) -> None:
        """Fail the open calls with how the child ended."""
        code = self._end(END_SECONDS)  # its end of the pair is closed: it should be going
        death = f"{self.title} (process {self.pid}) ended {describe_end(code)}.{self._last_lines()}"
        with self._lock:
            self._death = death
            calls = list(self._open.values())
            self._open.clear()
        for call in calls:
            call.future.set_exception(WorkerError(f"{call.name} was not answered: {death}"))

    def _last_lines(self) -> str:
        descriptor = self._log.fileno()
        size = os.fstat(descriptor).st_size
        tail = os.pread(descriptor, TAIL_BYTES, max(0, size - TAIL_BYTES))
        text = tail.decode(errors="replace").strip()
        return f" Its last lines:\n{text}" if text else ""

    def _end(self, grace_seconds: float) -> int:
        """Wait for the child, kill it after the grace, and all of its session; return its code."""
        with self._end_lock:
            deadline = time.monotonic() + grace_seconds
            while not self._has_ended() and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            self._kill_session()
            return self._process.wait()

    def _kill(self) -> None:
        with self._end_lock:
            self._kill_session()

    def _has_ended(self) -> bool:
        """Tell whether the child has ended; it stays a zombie, so that its id stays its own."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _kill_session(self) -> None:
        if self._process.returncode is None:  # once it is reaped, the id may be another's
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


def inherited_environment() -> dict[str, str]:
    """Return this process's environment without its place in a launcher's world."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_NAMES and not name.startswith(LAUNCHER_PREFIXES)
    }


def describe_end(code: int) -> str:
    """Say how a process ended: `by signal SIGKILL`, `with code 1`."""
    if code >= 0:
        return f"with code {code}"
    return f"by signal {signal.Signals(-code).name}"
