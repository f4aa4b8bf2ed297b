"""Messages between a process and its child: a length of four bytes, then JSON. No pickle."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 256 << 20  # token ids of a batch need megabytes; more means a broken stream


def encode_frame(message: Mapping[str, Any]) -> bytes:
    """Return the bytes of one message; ValueError if it is too long."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body)} bytes; {MAX_FRAME_BYTES} are allowed")
    return HEADER.pack(len(body)) + body


class FrameDecoder:
    """Puts messages together from bytes as they come."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, received: bytes) -> Iterator[dict[str, Any]]:
        """Yield the messages that are complete now; ValueError if these are no frames."""
        self._bytes += received
        while len(self._bytes) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._bytes)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes; {MAX_FRAME_BYTES} are allowed")
            end = HEADER.size + length
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[HEADER.size : end])
            del self._bytes[:end]
            message = json.loads(body)
            if not isinstance(message, dict):
                raise ValueError(f"a frame that holds {type(message).__name__}, not an object")  # noqa: TRY004  # one kind of error for a broken stream
            yield message
