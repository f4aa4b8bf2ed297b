"""Frames survive any cutting of the stream, and broken streams are told."""

from __future__ import annotations

import pytest

from fsdpbench.engine.rollout.frames import HEADER, MAX_FRAME_BYTES, FrameDecoder, encode_frame

MESSAGES = [{"id": 0}, {"id": 1, "tokens": [1, 2, 3]}, {"text": "caf\u00e9", "none": None}]


@pytest.mark.parametrize("step", [1, 3, 7, 1000])
def test_messages_come_whole_however_they_are_cut(step):
    stream = b"".join(map(encode_frame, MESSAGES))
    decoder = FrameDecoder()
    found = []
    for start in range(0, len(stream), step):
        found += decoder.feed(stream[start : start + step])
    assert found == MESSAGES


@pytest.mark.parametrize(
    "stream",
    [HEADER.pack(MAX_FRAME_BYTES + 1), HEADER.pack(2) + b"{]", HEADER.pack(2) + b"[]"],
    ids=["too long", "no JSON", "no object"],
)
def test_a_broken_stream_is_refused(stream):
    with pytest.raises(ValueError, match=r"frame|Expecting"):
        list(FrameDecoder().feed(stream))


def test_a_message_that_is_too_long_is_refused(monkeypatch):
    monkeypatch.setattr("fsdpbench.engine.rollout.frames.MAX_FRAME_BYTES", 10)
    with pytest.raises(ValueError, match="10 are allowed"):
        encode_frame({"text": "x" * 20})
