"""The user's wish to end: Ctrl-C, SIGTERM and SIGHUP mean the same.

While trials run it is a flag, so that signals never interrupt the harness in the middle of a write;
who runs something long asks for it. A further Ctrl-C changes nothing, for ending takes a moment
only: the running trial is killed, not asked. At all other moments it is the exception
`Interrupted`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Self

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_INTERRUPTED = 130  # as shells report an end by Ctrl-C


class Interrupted(BaseException):
    """The user wants to end. Like KeyboardInterrupt, it is no error that a reader may survive."""


def interrupt_on_signals() -> None:
    """Let each of the signals raise `Interrupted`, but for those that the caller has ignored."""
    for number in NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _interrupt)


def end_on_signals() -> None:
    """Let a signal end the process without a word: nothing is left to be kept or to be said."""
    for number in NUMBERS:
        if signal.getsignal(number) is _interrupt:
            signal.signal(number, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise Interrupted


class StopFlag:
    """Context manager that owns the signal handlers; call it to ask. Main thread only."""

    def __init__(self, on_first: Callable[[], None] = lambda: None) -> None:
        self._on_first = on_first
        self._is_set = False
        self._is_announced = False
        self._before: dict[signal.Signals, object] = {}

    def __call__(self) -> bool:
        """Say whether the user wants to end; the first time that this is so, `on_first` is called.

        Never from the handler: it may have interrupted a write to the stream that it would use.
        """
        if self._is_set and not self._is_announced:
            self._is_announced = True
            self._on_first()
        return self._is_set

    def __enter__(self) -> Self:
        for number in NUMBERS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what getsignal returned

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._is_set = True
