"""The wire to a generation server: HTTP calls as futures, each with one deadline for all of it.

A thread of its own runs the event loop, so that any thread may call and wait, and a deadline holds
over connecting, waiting and an answer that trickles in. This is the one module that knows httpx2.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx2

from fsdpbench.engine.rollout.dialects import RefusalError, ServerCall, quote
from fsdpbench.errors import WorkerError

MAX_ANSWER_BYTES = 256 << 20
IDLE_SECONDS = 2.0  # servers close idle connections after 5 s; ours go first, so none is half dead
CLOSE_SECONDS = 5.0

Result = TypeVar("Result")


class ServerChannel:
    """Carries calls to one server. Close it; calls that run then fail."""

    def __init__(self, url: str, title: str, token: str | None, timeout_seconds: float) -> None:
        self.url, self.title, self.timeout_seconds = url.rstrip("/"), title, timeout_seconds
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=title, daemon=True)
        self._client = httpx2.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=None,  # the deadline of the whole call stands above
            trust_env=False,  # rollout servers are inside the cluster, no proxy leads to them
            limits=httpx2.Limits(max_connections=None, keepalive_expiry=IDLE_SECONDS),
        )
        self._is_closing = False
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine on the channel's loop."""
        if self._is_closing:
            work.close()
            raise WorkerError(f"{self.title}: the connection was closed")
        return asyncio.run_coroutine_threadsafe(self._guard(work), self._loop)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the channel's loop and wait for it."""
        return self.submit(work).result()

    async def ask(self, call: ServerCall, timeout_seconds: float | None = None) -> Any:
        """Return the answer's JSON (None if empty); WorkerError for everything else,
        RefusalError where the server itself says no.

        None as well where the server lacks an optional path.
        """
        limit = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        where = f"{self.title}: {call.method} {call.path}"
        try:
            async with asyncio.timeout(limit):
                status, body = await self._exchange(call, where)
        except TimeoutError as error:
            raise WorkerError(
                f"{where}: no whole answer within {limit:g} s. Is the server stuck or too busy? "
                "See its log; raise the time-out if it only needs longer."
            ) from error
        except httpx2.TransportError as error:
            raise WorkerError(
                f"{where}: the server cannot be reached or broke off "
                f"({type(error).__name__}: {quote(str(error))}). Does it run, and is the address "
                "right?"
            ) from error
        if status == 404 and call.is_optional:
            return None
        if status != 200:
            raise RefusalError(f"{where}: {_describe_refusal(status, body)}")
        return _read_json(body, where) if call.reads_json else None

    def close(self) -> None:
        """End every call and the thread. Never raises."""
        if self._is_closing:
            return
        self._is_closing = True
        closing = asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop)
        try:
            closing.result(CLOSE_SECONDS)
        except TimeoutError:
            closing.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    async def _guard(self, work: Coroutine[Any, Any, Result]) -> Result:
        try:
            return await work
        except asyncio.CancelledError:
            if self._is_closing:
                raise WorkerError(f"{self.title}: the connection was closed") from None
            raise

    async def _exchange(self, call: ServerCall, where: str) -> tuple[int, bytes]:
        content = None if call.body is None else json.dumps(call.body).encode()
        headers = {} if content is None else {"Content-Type": "application/json"}
        parts, num_bytes = [], 0
        request = self._client.stream(
            call.method, call.path, params=dict(call.query), content=content, headers=headers
        )
        async with request as response:
            async for part in response.aiter_bytes():
                parts.append(part)
                num_bytes += len(part)
                if num_bytes > MAX_ANSWER_BYTES:
                    raise WorkerError(f"{where}: an answer of more than {MAX_ANSWER_BYTES} bytes")
        return response.status_code, b"".join(parts)

    async def _shut_down(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()
        await self._loop.shutdown_asyncgens()
        await asyncio.sleep(0)  # closed sockets are let go in the loop's next round
        await asyncio.sleep(0)


def _describe_refusal(status: int, body: bytes) -> str:
    text = quote(_find_message(body))
    if status in (401, 403):
        return (
            f"refused with status {status} ({text}). Give the server's API key as the token of "
            "its settings."
        )
    if status == 404:
        return (
            f"the server has no such path ({text}). vLLM needs VLLM_SERVER_DEV_MODE=1 in its "
            "environment; also check the dialect, the model's name and the server's release."
        )
    return f"status {status}: {text}"


def _find_message(body: bytes) -> str:
    """Return the message of the usual shapes of errors, else the text as it is."""
    text = body.decode(errors="replace")
    try:
        values = json.loads(text)
    except ValueError:
        return text
    error = values.get("error", values) if isinstance(values, dict) else values
    if isinstance(error, dict):
        return str(error.get("message") or error.get("detail") or error)
    return str(error)


def _read_json(body: bytes, where: str) -> Any:
    if not body.strip():
        return None
    try:
        return json.loads(body)
    except ValueError as error:
        text = quote(body.decode(errors="replace"))
        raise WorkerError(f"{where}: the answer is no JSON: {text}") from error
