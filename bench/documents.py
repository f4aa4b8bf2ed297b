"""Reads training text: JSON Lines or plain text, from the user's file or the bundled one.

A line of JSON Lines is one of {"text"}, {"prompt", "completion"} or {"messages": [{"role",
"content"}, ...]}; other keys are ignored. Loss falls on text, completions and the assistant's
messages. A .txt file holds documents with empty lines between them. Every mistake in the part that
is read is reported with its line, all at once. No torch import.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpbench.bench.corpus import DEFAULT_DATA
from fsdpbench.bench.json_text import parse_json
from fsdpbench.bench.records import WorkloadSpec
from fsdpbench.errors import ConfigError, Violation

FIELDS = '{"text"}, {"prompt", "completion"} or {"messages": [{"role", "content"}, ...]}'
CHARACTERS_PER_TOKEN = 8  # more than any tokenizer packs into a token of prose on average
MIN_LENGTH = 2  # a lone token predicts nothing
MAX_REPORTED = 5  # mistakes listed; a file of another kind has one on every line
SUFFIXES = (".jsonl", ".txt")


@dataclass(frozen=True)
class Segment:
    """A stretch of a document, and whether the model is to learn it."""

    text: str
    is_target: bool = True


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class Document:
    """One training example: a conversation, or stretches of plain text."""

    segments: tuple[Segment, ...]
    messages: tuple[Message, ...] = ()  # a conversation, for tokenizers that have a template

    @property
    def num_characters(self) -> int:
        """Length of the text."""
        return sum(len(segment.text) for segment in self.segments)


def load_workload(spec: WorkloadSpec, dp_size: int) -> list[Document]:
    """Check the specification and read as many documents as the trial can use.

    The planner of a sweep does so too, so that a point whose text cannot be read never starts.
    """
    if spec.sequence_lengths is not None:
        check_lengths(spec.sequence_lengths, spec.tokens_per_step)
    num_tokens = spec.num_steps * count_step_tokens(spec, dp_size)
    return load_documents(spec.data, max_characters=num_tokens * CHARACTERS_PER_TOKEN)


def check_lengths(lengths: Sequence[int], tokens_per_step: int) -> None:
    """Raise ConfigError for lengths that are no sequences, or that are not the step's tokens."""
    if not lengths or min(lengths) < MIN_LENGTH:
        allowed = f"needs one length at least, each {MIN_LENGTH} or more"
        raise ConfigError([Violation("workload.sequence_lengths", str(list(lengths)), allowed)])
    if tokens_per_step != sum(lengths):
        allowed = f"must be {sum(lengths)}, the sum of workload.sequence_lengths"
        remedy = (
            "leave it out, or give other lengths; with sequence_lengths null the text's own "
            "lengths fill it"
        )
        found = str(tokens_per_step)
        raise ConfigError([Violation("workload.tokens_per_step", found, allowed, remedy)])


def count_step_tokens(spec: WorkloadSpec, dp_size: int) -> int:
    """Return the tokens of one step over all data-parallel indices."""
    return dp_size * spec.tokens_per_step


def load_documents(path: str | None, max_characters: int | None = None) -> list[Document]:
    """Read documents from the file's start until they hold `max_characters`; None reads all.

    `path` None means the bundled text. Raises ConfigError when the file is missing, is of another
    kind, has mistakes in what was read, or holds no text.
    """
    if path is not None and (not path.strip() or "\0" in path):
        allowed, remedy = "names no file", "leave it out to train on the bundled text"
        raise ConfigError([Violation("workload.data", repr(path), allowed, remedy)])
    file = DEFAULT_DATA if path is None else Path(path)
    reader = {".jsonl": _read_jsonl, ".txt": _read_text}.get(file.suffix)
    if reader is None:
        allowed = f"must end in {' or '.join(SUFFIXES)}"
        remedy = f"rename it; a line of .jsonl is {FIELDS}"
        raise ConfigError([Violation("workload.data", str(path), allowed, remedy)])
    documents: list[Document] = []
    violations: list[Violation] = []
    num_characters = 0
    for item in _open(file, reader):
        if isinstance(item, Violation):
            violations.append(item)
        else:
            documents.append(item)
            num_characters += item.num_characters
        if len(violations) >= MAX_REPORTED:
            break
        if max_characters is not None and num_characters >= max_characters:
            break
    if violations:
        raise ConfigError(violations)
    if not documents:
        raise ConfigError([Violation("workload.data", str(file), "holds no text")])
    return documents


def _open(file: Path, reader: Any) -> Iterator[Document | Violation]:
    if file.exists() and not file.is_file():  # reading a pipe or a device may never end
        raise ConfigError([Violation("workload.data", str(file), "is not a file")])
    try:
        with file.open(encoding="utf-8") as stream:
            yield from reader(file, stream)
    except OSError as error:
        allowed = f"cannot be read: {error.strerror or error}"
        raise ConfigError([Violation("workload.data", str(file), allowed)]) from None
    except UnicodeDecodeError as error:
        allowed = f"must be UTF-8 text ({error.reason})"
        raise ConfigError([Violation("workload.data", str(file), allowed)]) from None


def _read_text(file: Path, stream: Iterator[str]) -> Iterator[Document]:
    del file
    paragraph: list[str] = []
    for line in stream:
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield Document((Segment("".join(paragraph)),))
            paragraph = []
    if paragraph:
        yield Document((Segment("".join(paragraph)),))


def _read_jsonl(file: Path, stream: Iterator[str]) -> Iterator[Document | Violation]:
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            entry = parse_json(line.rstrip())
        except ValueError as error:
            yield Violation(where, "", f"is not JSON: {error}")
            continue
        yield parse_entry(entry, where)


def parse_entry(entry: Any, where: str) -> Document | Violation:
    """Turn one JSON value into a document, or into what is wrong with it."""
    if not isinstance(entry, dict):
        return Violation(where, type(entry).__name__, f"must be an object: {FIELDS}")
    if "messages" in entry:
        return _parse_messages(entry["messages"], where)
    names = ("prompt", "completion") if "prompt" in entry or "completion" in entry else ("text",)
    for name in names:
        if name not in entry:
            keys = ", ".join(map(str, entry)) or "no keys"
            return Violation(where, keys, f"has no {name!r}; a line is {FIELDS}")
        if not isinstance(entry[name], str):
            found = type(entry[name]).__name__
            return Violation(f"{where}: {name}", found, "must be a string")
    target = names[-1]
    if not entry[target]:
        return Violation(f"{where}: {target}", "''", "must not be empty")
    segments = [Segment(entry[name], name == target) for name in names if entry[name]]
    return Document(tuple(segments))


def _parse_messages(value: Any, where: str) -> Document | Violation:
    if not isinstance(value, list) or not value:
        return Violation(f"{where}: messages", type(value).__name__, "must be a list of messages")
    messages = []
    for index, item in enumerate(value):
        place = f"{where}: messages[{index}]"
        if not isinstance(item, dict):
            return Violation(place, type(item).__name__, 'must be {"role", "content"}')
        for name in ("role", "content"):
            if not isinstance(item.get(name), str):
                found = type(item[name]).__name__ if name in item else "missing"
                return Violation(f"{place}.{name}", found, "must be a string")
        messages.append(Message(item["role"], item["content"]))
    if not any(message.role == "assistant" for message in messages):
        allowed = "needs a message with role 'assistant': the model learns from those"
        return Violation(f"{where}: messages", "no assistant", allowed)
    return Document(tuple(spell_messages(messages)), tuple(messages))


def spell_messages(messages: list[Message]) -> Iterator[Segment]:
    """Write a conversation as plain text, for models without a template of their own."""
    for message in messages:
        yield Segment(f"{message.role}: ", is_target=False)
        yield Segment(f"{message.content}\n", is_target=message.role == "assistant")
