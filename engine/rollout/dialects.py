"""What a generation server of another make is asked, as plain records; no network here.

A dialect turns the steps of `InferenceEngine` into calls and reads the answers. Both are pure, so
that a test can hold them against the server's own request classes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from fsdpbench.errors import WeightSyncError, WorkerError, list_names

if TYPE_CHECKING:
    from fsdpbench.engine.rollout.generation import SamplingSettings
    from fsdpbench.engine.weight_sync.records import Bucket, GroupAddress

QUOTED_LENGTH = 300  # characters of a foreign answer that an error repeats


class RefusalError(WorkerError):
    """The server answered, and refused."""


@dataclass(frozen=True)
class ServerCall:
    """One HTTP request."""

    path: str
    body: Mapping[str, Any] | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    method: str = "POST"
    is_optional: bool = False  # a server that lacks the path does without (404)
    reads_json: bool = True  # else the answer is a sentence for people


@dataclass(frozen=True)
class ServerFacts:
    """What a server says of itself."""

    model: str  # the name that requests carry
    folder: str  # the weights that it began with: a folder or an id of the hub
    world_size: int  # ranks that join a weight-update group
    weight_version: str | None  # the label it keeps with its weights; None: it keeps none
    takes_groups: bool  # whether it can join a weight-update group at all
    why_no_groups: str = ""
    logprobs_follow_temperature: bool = True  # else they are of the model's own distribution


@dataclass(frozen=True)
class GenerationRequest:
    """One sequence to go on with."""

    model: str
    tokens: tuple[int, ...]  # prompt and what was generated so far
    num_done: int  # generated tokens among them
    seed: int  # of this sequence and this continuation alone
    settings: SamplingSettings

    @property
    def num_left(self) -> int:
        """Tokens that may still be generated."""
        return self.settings.max_new_tokens - self.num_done


class Dialect(Protocol):
    """How one make of server is spoken to."""

    name: str
    restores_after_failed_load: bool  # a failed load from disk leaves the old weights in force
    after_failed_load: str  # advice, where it leaves something else
    joins_by_id: bool  # of an NCCL communicator; else through the store of a weight-update group

    def ask_facts(self) -> Mapping[str, ServerCall]:
        """Return the calls whose answers `read_facts` needs, by a name of their own."""
        ...

    def read_facts(self, answers: Mapping[str, Any]) -> ServerFacts:
        """Read what the server is; an optional call that it lacks has the answer None."""
        ...

    def pause(self, in_flight: str) -> list[ServerCall]:
        """Stop generating, with an empty cache; requests of this client run only to be aborted."""
        ...

    def resume(self) -> list[ServerCall]:
        """Generate again."""
        ...

    def join_group(self, address: GroupAddress) -> list[ServerCall]:
        """Join a weight-update group."""
        ...

    def begin_update(self) -> list[ServerCall]:
        """Get ready for the first bucket."""
        ...

    def receive_bucket(self, bucket: Bucket, address: GroupAddress) -> list[ServerCall]:
        """Receive and apply one bucket."""
        ...

    def load_folder(self, path: str, timeout_seconds: float) -> list[ServerCall]:
        """Load a Hugging Face folder."""
        ...

    def finish_update(self, label: str, *, in_session: bool) -> list[ServerCall]:
        """Put the weights into force; `in_session`: they came in buckets."""
        ...

    def leave_group(self, address: GroupAddress) -> list[ServerCall]:
        """Leave the weight-update group."""
        ...

    def label_weights(self, label: str) -> ServerCall:
        """Have the server keep a label with its weights."""
        ...

    def ask_label(self) -> ServerCall:
        """Ask for the label; `read_label` reads the answer."""
        ...

    def read_label(self, answer: Any) -> str | None:
        """Read the label; None if the server keeps none."""
        ...

    def generate(self, request: GenerationRequest) -> ServerCall:
        """Generate after one sequence; `read_generation` reads the answer."""
        ...

    def read_generation(self, answer: Any) -> dict[str, Any]:
        """Return tokens, logprobs and finish_reason."""
        ...

    def score(self, model: str, tokens: Sequence[int]) -> ServerCall:
        """Ask for the log-probs of a given sequence; `read_scores` reads the answer."""
        ...

    def read_scores(self, answer: Any, tokens: Sequence[int]) -> list[float]:
        """Return log p(token | tokens before it) of each token but the first."""
        ...

    def read_failure(self, answer: Any) -> str | None:
        """Return what an answer with status 200 complains of; None if it is well."""
        ...


def build_seed(seed: int, index: int, num_done: int) -> int:
    """Return the seed of one request: its own for each sequence and each continuation.

    A server gives equal draws for equal seeds, so the samples of one prompt must not share one.
    """
    return random.Random(f"{seed}:{index}:{num_done}").getrandbits(31)


def check_unpadded(bucket: Bucket) -> None:
    """Raise WeightSyncError where a packed bucket has gaps between its tensors."""
    odd = [spec.name for spec in bucket.specs if spec.num_bytes % 16]
    if bucket.packed and odd:
        raise WeightSyncError(
            f"bucket {bucket.index}: {list_names(odd)}: the bytes are no multiple of 16 and would "
            "be padded, which this server cannot unpack. Send single tensors (packed=False of the "
            "server's settings), or switch weight_update_mode to disk."
        )


def broken_answer(what: str, answer: Any) -> WorkerError:
    """Return the error for an answer of another shape than expected."""
    return WorkerError(
        f"{what}: the answer has not the expected shape: {quote(json.dumps(answer, default=str))}. "
        "Is the server of the make and release that the dialect names?"
    )


def quote(text: str) -> str:
    """Return foreign text for a message: short, on one line, without control characters."""
    clean = "".join(character if character.isprintable() else " " for character in text)
    clean = " ".join(clean.split())
    return clean if len(clean) <= QUOTED_LENGTH else clean[:QUOTED_LENGTH] + "..."
