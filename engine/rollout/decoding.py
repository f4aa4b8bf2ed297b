"""Token-by-token generation of a batch with a plain transformers model.

Schedule: one pass over the left-padded prompts fills the cache, then one pass a step adds a token
to every sequence until all have ended or somebody interrupts. The cache lives in the call alone, so
no state of older weights survives an update. Sequence i draws one number a token from a stream of
its own, so what it becomes depends on neither its neighbours nor on interruptions.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from fsdpbench.engine.rollout.generation import FinishReason, SamplingSettings
from fsdpbench.errors import ConfigError, Violation, list_names


@dataclass
class OpenSequence:
    """A sequence that grows."""

    tokens: list[int]  # prompt, and what earlier calls generated
    num_left: int
    stream: random.Random
    new_tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "abort"

    @property
    def is_open(self) -> bool:
        """Whether it takes more tokens."""
        return self.finish_reason == "abort"

    def add(self, token: int, logprob: float, stop_ids: frozenset[int]) -> None:
        """Append a token and see whether it was the last."""
        self.new_tokens.append(token)
        self.logprobs.append(logprob)
        if token in stop_ids:
            self.finish_reason = "stop"
        elif len(self.new_tokens) == self.num_left:
            self.finish_reason = "length"


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    requests: Sequence[Mapping[str, Any]],
    settings: SamplingSettings,
    stop_ids: frozenset[int],
    is_interrupted: Callable[[], bool],
) -> list[OpenSequence]:
    """Generate until every sequence ends; those that an interruption leaves stay `abort`."""
    sequences = [open_sequence(request, settings) for request in requests]
    check_sequences(model, sequences)
    input_ids, mask = pad_left([sequence.tokens for sequence in sequences], model.device)
    cache = {name_of_cache(model): DynamicCache(config=model.config)}  # grows in place
    while any(sequence.is_open for sequence in sequences) and not is_interrupted():
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        outputs = model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **cache,
        )
        tokens, logprobs = choose_tokens(outputs.logits[:, -1], settings.temperature, sequences)
        for sequence, token, logprob in zip(
            sequences, tokens.tolist(), logprobs.tolist(), strict=True
        ):
            if sequence.is_open:
                sequence.add(token, logprob, stop_ids)
        input_ids = tokens[:, None]  # an ended sequence goes on, unseen
        mask = torch.cat([mask, mask.new_ones(len(sequences), 1)], dim=1)
    return sequences


def name_of_cache(model: PreTrainedModel) -> str:
    """Return the argument that takes the cache, which newer transformers call `cache`."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def open_sequence(request: Mapping[str, Any], settings: SamplingSettings) -> OpenSequence:
    """Return a sequence ready to grow; its stream stands where an earlier call left it."""
    stream = random.Random(f"{settings.seed}/{request['index']}")
    num_done = request["num_done"]
    for _ in range(num_done):
        stream.random()
    return OpenSequence(request["tokens"], settings.max_new_tokens - num_done, stream)


def choose_tokens(
    logits: torch.Tensor, temperature: float, sequences: Sequence[OpenSequence]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose a token a sequence from logits [B, V]; return ids and log-probs [B].

    Drawing inverts the cumulative distribution at one number from each sequence's stream.
    """
    scaled = logits.float() / temperature if temperature > 0 else logits.float()
    logprobs = torch.log_softmax(scaled, dim=-1)
    if temperature > 0:
        cumulative = logprobs.double().exp().cumsum(-1)
        draws = [sequence.stream.random() for sequence in sequences]
        marks = torch.tensor(draws, dtype=torch.float64, device=logits.device)
        marks = marks[:, None] * cumulative[:, -1:]  # rounding leaves the last not quite 1
        found = torch.searchsorted(cumulative, marks, right=True)[:, 0]
        tokens = found.clamp(max=logits.shape[-1] - 1)
    else:
        tokens = logprobs.argmax(-1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def pad_left(
    sequences: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and mask [B, longest], padding before the tokens."""
    longest = max(map(len, sequences))
    ids = [[0] * (longest - len(tokens)) + list(tokens) for tokens in sequences]
    mask = [[0] * (longest - len(tokens)) + [1] * len(tokens) for tokens in sequences]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def check_sequences(model: PreTrainedModel, sequences: Sequence[OpenSequence]) -> None:
    """Refuse what the model cannot take, before a kernel fails on it."""
    check_tokens(model, [sequence.tokens for sequence in sequences])
    longest = max(len(sequence.tokens) + sequence.num_left for sequence in sequences)
    limit = getattr(model.config, "max_position_embeddings", None) or longest
    if longest > limit:
        found = f"prompt and new tokens reach {longest}"
        raise ConfigError([Violation("max_new_tokens", found, f"the model has {limit} positions")])


def check_tokens(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> None:
    """Refuse no sequences, empty ones, and ids that the embedding has no row for."""
    embedding: Any = model.get_input_embeddings()
    num_ids = embedding.num_embeddings
    violations = [] if sequences else [Violation("prompts", "[]", "give at least one")]
    for index, tokens in enumerate(sequences):
        outside = [token for token in tokens if not 0 <= token < num_ids]
        if outside or not tokens:
            found = list_names(map(str, outside)) if outside else "[]"
            allowed = f"token ids from 0 to {num_ids - 1}, at least one"
            violations.append(Violation(f"prompts[{index}]", found, allowed))
    if violations:
        raise ConfigError(violations)
