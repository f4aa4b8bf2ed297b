"""Reads the Python stacks that a hanging rank wrote when it was asked (faulthandler)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TAIL_BYTES = 256 << 10
_MAIN_THREAD = re.compile(r"^Current thread 0x[0-9a-f]+.*\(most recent call first\):", re.MULTILINE)
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_WAITING = re.compile(
    r"^(?:wait|_wait\w*|synchronize|barrier|monitored_barrier|all_reduce|all_gather\w*|reduce_scatter\w*"
    r"|_?all_to_all\w*|broadcast\w*|gather\w*|scatter\w*|recv|send|wait_tensor|item|tolist|full_tensor)$"
)


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({Path(self.file).name}:{self.line})"


def read_last_stack(path: Path) -> list[Frame]:
    """Return the main thread's frames of the last stack in a log, innermost first; or nothing."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    starts = list(_MAIN_THREAD.finditer(text))
    if not starts:
        return []
    frames: list[Frame] = []
    for line in text[starts[-1].end() :].splitlines()[1:]:
        match = _FRAME.match(line)
        if not match:
            break
        frames.append(Frame(match["file"], int(match["line"]), match["function"]))
    return frames


def waits_for_others(stack: Sequence[Frame]) -> bool:
    """Say whether the stack stands in a collective or waits for the device."""
    return any(_WAITING.match(frame.function) for frame in stack[:4])
