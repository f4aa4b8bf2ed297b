"""What is asked of a generator and what it gives back, token by token. No torch.

A request that a pause breaks off is put together by the client: each answer carries the version of
the weights that made it, so a sequence knows the version of each of its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from fsdpbench.errors import ConfigError, Violation

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are chosen."""

    max_new_tokens: int
    temperature: float = 1.0  # 0: the most probable token
    seed: int = 0  # sequence i of a request draws from (seed, i), whatever its neighbours
    stop_token_ids: tuple[int, ...] | None = None  # None: the model's own; (): never stop

    def __post_init__(self) -> None:
        checks = {
            "max_new_tokens": (self.max_new_tokens >= 1, "must be at least 1"),
            "temperature": (0 <= self.temperature < float("inf"), "must be 0 or more"),
        }
        violations = [
            Violation(name, repr(getattr(self, name)), allowed)
            for name, (right, allowed) in checks.items()
            if not right
        ]
        if violations:
            raise ConfigError(violations)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build the record from what `dataclasses.asdict` gave."""
        ids = values["stop_token_ids"]
        return cls(**{**values, "stop_token_ids": None if ids is None else tuple(ids)})


@dataclass
class GeneratedSequence:
    """A prompt and what was generated after it so far."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    # of the distribution each token was drawn from: softmax(logits / temperature); greedy: of the
    # model's own
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the weights that made each token
    finish_reason: FinishReason = "abort"

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to generate."""
        return self.finish_reason != "abort"

    def to_request(self, index: int) -> dict[str, Any]:
        """Return what a generator needs to go on; `index` is the sequence's place in its batch."""
        num_done = len(self.tokens)
        return {"index": index, "tokens": [*self.prompt, *self.tokens], "num_done": num_done}

    def extend(self, part: Mapping[str, Any]) -> None:
        """Append an answer."""
        self.tokens += part["tokens"]
        self.logprobs += part["logprobs"]
        self.versions += [part["version"]] * len(part["tokens"])
        self.finish_reason = part["finish_reason"]


def build_request(
    sequences: Sequence[GeneratedSequence], settings: SamplingSettings
) -> dict[str, Any]:
    """Return the request that goes on with every sequence that is not finished."""
    open_ones = [
        sequence.to_request(index)
        for index, sequence in enumerate(sequences)
        if not sequence.is_finished
    ]
    return {"sequences": open_ones, "settings": asdict(settings)}
