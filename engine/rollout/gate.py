"""The gate that requests for tokens pass on their way to a server, so that a pause knows of each.

It lives on one event loop, whose single thread is its lock: between the look at the gate and the
request's entry into the set there is no await.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from fsdpbench.errors import WeightSyncError


class RecalledError(Exception):
    """The request was taken back for a pause; it may be sent again. Never leaves the client."""


class RequestGate:
    """Lets requests pass while it is open and knows those that are under way."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._event.set()
        self._requests: set[asyncio.Task[Any]] = set()
        self._recalled: set[asyncio.Task[Any]] = set()

    @property
    def num_requests(self) -> int:
        """Requests under way; any thread may ask."""
        return len(self._requests)

    def open(self) -> None:
        """Let requests pass."""
        self._event.set()

    def shut(self) -> None:
        """Let none pass from now on; those under way go on."""
        self._event.clear()

    async def wait_open(self, timeout_seconds: float) -> None:
        """Return when the gate is open; nothing may be awaited between this and `carry`."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while not self._event.is_set():
                    await self._event.wait()
        except TimeoutError as error:
            raise WeightSyncError(
                f"the server has been paused for {timeout_seconds:g} s. Finish the weight update "
                "and call continue_generation."
            ) from error

    async def carry(self, request: Coroutine[Any, Any, Any]) -> Any:
        """Return the answer to a request; RecalledError if it was taken back."""
        task = asyncio.ensure_future(request)
        self._requests.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if task in self._recalled:
                raise RecalledError from None
            raise
        finally:
            task.cancel()
            self._requests.discard(task)
            self._recalled.discard(task)

    async def settle(self, timeout_seconds: float) -> bool:
        """Wait for the requests under way; False if some still are after that time."""
        if not self._requests:
            return True
        _, open_ones = await asyncio.wait(self._requests, timeout=timeout_seconds)
        return not open_ones

    async def recall(self) -> None:
        """Take back what is under way; the server drops a request whose connection ends."""
        self._recalled |= self._requests
        tasks = list(self._requests)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
