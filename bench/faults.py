"""Faults that a worker makes on purpose, so that detection and diagnosis can be proved.

A fault is written `NAME@STEP[:rank=RANK]`, as `hang@3` or `kill@3:rank=1`; steps count from 0,
warm-up included, and the fault strikes before that step on that rank (0 by default). `FAULTS` is
the registry: a name, what it does in words, and the action. No torch here: what needs a device
comes in through `FaultContext`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from fsdpbench.errors import ConfigError, Violation

SYNTAX = "NAME@STEP or NAME@STEP:rank=RANK"
IMPOSSIBLE_BYTES = 1 << 52  # more than any machine can give: the allocation fails at once


@dataclass(frozen=True)
class FaultContext:
    """What an action may use: where it strikes and how memory is asked for there."""

    rank: int
    step: int
    allocate: Callable[[int], object]  # bytes of device memory (host memory on the CPU)


@dataclass(frozen=True)
class FaultKind:
    """One row of the registry."""

    description: str
    strike: Callable[[FaultContext], None]


@dataclass(frozen=True)
class Fault:
    """A parsed fault."""

    name: str
    step: int
    rank: int = 0

    def strikes(self, *, rank: int, step: int) -> bool:
        """Say whether this rank meets the fault before this step."""
        return (rank, step) == (self.rank, self.step)


def hang(context: FaultContext) -> None:
    """Never return: the rank's peers wait for it in their next collective."""
    del context
    while True:
        time.sleep(3600)


def kill(context: FaultContext) -> None:
    """End the own process as the kernel's out-of-memory killer would: SIGKILL, no last words."""
    del context
    os.kill(os.getpid(), signal.SIGKILL)


def crash(context: FaultContext) -> None:
    """Raise an error that no code of ours expects."""
    message = f"injected crash on rank {context.rank} before step {context.step}"
    raise RuntimeError(message)


def exhaust_memory(context: FaultContext) -> None:
    """Ask the device's allocator for more than it can have, so that its own error is raised."""
    context.allocate(IMPOSSIBLE_BYTES)
    message = f"injected oom on rank {context.rank}: {IMPOSSIBLE_BYTES} bytes were granted"
    raise RuntimeError(message)


FAULTS: dict[str, FaultKind] = {
    "hang": FaultKind("the rank sleeps forever", hang),
    "kill": FaultKind("the rank kills itself with SIGKILL", kill),
    "crash": FaultKind("the rank raises RuntimeError", crash),
    "oom": FaultKind("the rank's allocator fails", exhaust_memory),
}


def parse_fault(text: str) -> Fault:
    """Parse `NAME@STEP[:rank=RANK]`; raises ConfigError with all that is wrong in it."""
    violations = []
    head, _, options = text.partition(":")
    name, at, step = head.partition("@")
    if name not in FAULTS:
        close = get_close_matches(name, FAULTS, n=1)
        remedy = f"did you mean {close[0]!r}?" if close else f"write {SYNTAX}"
        allowed = f"must name one of {', '.join(FAULTS)}"
        violations.append(Violation("fault", repr(text), allowed, remedy))
    if not at or not step.isdecimal():
        allowed = "needs a step, counted from 0, after @"
        violations.append(Violation("fault", repr(text), allowed, f"write {SYNTAX}"))
    rank = options.removeprefix("rank=")
    if options and not (options.startswith("rank=") and rank.isdecimal()):
        allowed = f"has the option {options!r}; the only one is rank=RANK"
        violations.append(Violation("fault", repr(text), allowed, f"write {SYNTAX}"))
    if violations:
        raise ConfigError(violations)
    return Fault(name, int(step), int(rank or 0))


def strike_fault(fault: Fault | None, context: FaultContext) -> None:
    """Make the fault if it is due on this rank before this step."""
    if fault is not None and fault.strikes(rank=context.rank, step=context.step):
        FAULTS[fault.name].strike(context)
