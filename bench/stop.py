"""The user's wish to end, as a flag: signals never interrupt the harness in the middle of a write.

Ctrl-C, SIGTERM and SIGHUP set it; who runs something long asks for it. A further Ctrl-C changes
nothing, for ending takes a moment only: the running trial is killed, not asked.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Self

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopFlag:
    """Context manager that owns the signal handlers; call it to ask. Main thread only."""

    def __init__(self, on_first: Callable[[], None] = lambda: None) -> None:
        self._on_first = on_first
        self._is_set = False
        self._before: dict[signal.Signals, object] = {}

    def __call__(self) -> bool:
        """Say whether the user wants to end."""
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
        if not self._is_set:
            self._is_set = True
            self._on_first()
