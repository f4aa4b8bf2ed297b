"""Turns documents into token ids and target masks: by bytes, or with the model's own tokenizer.

Byte ids: 0 is padding, 1 begins a document, 2 ends it, byte b is b + 3. They serve every model that
comes without a tokenizer, whatever the size of its vocabulary. No torch import.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from fsdpbench.bench.documents import Document, Segment
from fsdpbench.errors import ConfigError, Violation
from fsdpbench.log import get_logger, warn_once

logger = get_logger(__name__)

BYTE_BEGIN = 1
BYTE_END = 2
BYTE_OFFSET = 3
NUM_BYTE_IDS = 256 + BYTE_OFFSET


@dataclass(frozen=True)
class EncodedDocument:
    """Token ids, and for each whether the model is to learn it."""

    ids: tuple[int, ...]
    is_target: tuple[bool, ...]


class Encoder(Protocol):
    """Turns a document into tokens."""

    def encode(self, document: Document) -> EncodedDocument:
        """Return the document's tokens; the same every time."""
        ...


class ByteEncoder:
    """One token a byte of UTF-8."""

    def encode(self, document: Document) -> EncodedDocument:
        """Return begin, bytes and end; the end is a target as its last byte is."""
        ids, targets = [BYTE_BEGIN], [False]
        for segment in document.segments:
            encoded = segment.text.encode()
            ids += [byte + BYTE_OFFSET for byte in encoded]
            targets += [segment.is_target] * len(encoded)
        return EncodedDocument((*ids, BYTE_END), (*targets, targets[-1]))


class ModelEncoder:
    """The model's own tokenizer; conversations go through its chat template where it has one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        begin = tokenizer.bos_token_id
        adds_begin = begin is not None and tokenizer.encode("a")[:1] == [begin]
        self._begin = [begin] if adds_begin else []
        self._end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def encode(self, document: Document) -> EncodedDocument:
        """Return the tokens, each segment tokenized by itself."""
        in_template = bool(document.messages) and bool(self._tokenizer.chat_template)
        segments = self._apply_template(document) if in_template else document.segments
        ids: list[int] = [] if in_template else list(self._begin)
        targets = [False] * len(ids)
        for segment in segments:
            encoded = self._tokenizer.encode(segment.text, add_special_tokens=False)
            ids += encoded
            targets += [segment.is_target] * len(encoded)
        if not in_template:
            ids += self._end
            targets += [segments[-1].is_target] * len(self._end)
        return EncodedDocument(tuple(ids), tuple(targets))

    def _apply_template(self, document: Document) -> tuple[Segment, ...]:
        """Render the conversation; what the template adds for an answer's turn is its target."""
        messages = [{"role": turn.role, "content": turn.content} for turn in document.messages]
        whole = self._render(messages)
        segments: list[Segment] = []
        done = ""
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:index], add_generation_prompt=True)
            after = self._render(messages[: index + 1])
            if not (
                before.startswith(done) and after.startswith(before) and whole.startswith(after)
            ):
                warn_once(
                    logger,
                    "workload.data: this chat template rewrites earlier turns, so that answers "
                    "cannot be told apart; every token of a conversation is trained on",
                )
                return (Segment(whole),)
            segments.append(Segment(before[len(done) :], is_target=False))
            segments.append(Segment(after[len(before) :]))
            done = after
        segments.append(Segment(whole[len(done) :], is_target=False))
        return tuple(segment for segment in segments if segment.text)

    def _render(self, messages: list[dict[str, str]], **options: bool) -> str:
        if not messages:
            return ""
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **options))


def choose_encoder(tokenizer: Any | None) -> Encoder:
    """Return the encoder for a model's tokenizer, or the one by bytes if the model has none."""
    return ByteEncoder() if tokenizer is None else ModelEncoder(tokenizer)


def check_ids(documents: Iterable[EncodedDocument], vocab_size: int) -> None:
    """Raise ConfigError when a token lies outside of the model's vocabulary."""
    highest = max((max(document.ids) for document in documents if document.ids), default=0)
    if highest >= vocab_size:
        allowed = f"the data holds token {highest}"
        remedy = (
            f"use the tokenizer that belongs to the model; bytes need {NUM_BYTE_IDS} ids at most"
        )
        raise ConfigError([Violation("vocab_size", str(vocab_size), allowed, remedy)])
