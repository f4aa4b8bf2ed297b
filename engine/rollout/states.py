"""What a rollout engine may do at the moment, and under which version of the weights.

State machine: READY -pause-> PAUSED -begin-> UPDATING -finish-> PAUSED -resume-> READY. An update
that is given up leads to BROKEN, which generates nothing until another one is finished.
"""

from __future__ import annotations

import threading
from enum import Enum

from fsdpbench.errors import WeightSyncError

NO_VERSION = -1


class EngineState(Enum):
    """States of a rollout engine."""

    READY = "ready"  # generates
    PAUSED = "paused"  # whole weights, does not generate
    UPDATING = "updating"  # weights of two versions may be mixed
    BROKEN = "broken"  # an update was given up on the way, or there never were weights


class VersionKeeper:
    """The state and the version in force; methods are transitions, and safe between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state = EngineState.BROKEN
        self._version = NO_VERSION
        self._was_broken = True  # before the update under way
        self._why_broken = "no weights were loaded yet"

    @property
    def state(self) -> EngineState:
        """The present state."""
        return self._state

    @property
    def version(self) -> int:
        """The version in force; -1 where there is none, as while an update is under way."""
        with self._lock:
            return self._version if self._has_weights() else NO_VERSION

    def pause(self) -> None:
        """Stop generating; no change where nothing is generated anyway."""
        with self._lock:
            if self._state is EngineState.READY:
                self._state = EngineState.PAUSED

    def resume(self) -> None:
        """Generate again; refused unless the weights are whole."""
        with self._lock:
            self._check_weights()
            self._state = EngineState.READY

    def begin_update(self) -> bool:
        """Enter an update, or go on with the one under way; True if it begins now."""
        with self._lock:
            if self._state is EngineState.READY:
                raise WeightSyncError(
                    "the engine is generating: its weights cannot change now. "
                    "Call pause_generation first."
                )
            if self._state is EngineState.UPDATING:
                return False
            self._was_broken = self._state is EngineState.BROKEN
            self._state = EngineState.UPDATING
            return True

    def finish_update(self, version: int) -> None:
        """Put the new weights into force."""
        with self._lock:
            self._state = EngineState.PAUSED
            self._version = version

    def give_up_update(self, reason: str, *, touched: bool) -> None:
        """Leave the update under way; weights that it has not `touched` stay in force."""
        with self._lock:
            if self._state is not EngineState.UPDATING:
                return
            whole = not touched and not self._was_broken
            self._state = EngineState.PAUSED if whole else EngineState.BROKEN
            self._why_broken = reason

    def check_weights(self) -> None:
        """Raise WeightSyncError where the weights are not those of one version."""
        with self._lock:
            self._check_weights()

    def _has_weights(self) -> bool:
        return self._state in (EngineState.READY, EngineState.PAUSED)

    def _check_weights(self) -> None:
        if self._has_weights():
            return
        updating = self._state is EngineState.UPDATING
        why = "an update has not finished" if updating else self._why_broken
        raise WeightSyncError(
            f"the engine holds no whole set of weights ({why}). Finish an update first; "
            "if xccl fails again, set weight_update_mode to disk."
        )
