"""Which linear layers get adapters: `target_modules` against the family's table. No torch.

A name means every linear layer of the decoder whose path it ends (`q_proj`, `self_attn.q_proj`,
`layers.0.self_attn.q_proj`), as in peft. Without names all of them get one. The embedding and the
head get none: their weights may be one tensor, and tensor parallelism cuts them by vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fsdpbench.errors import ConfigError, Violation

if TYPE_CHECKING:
    from fsdpbench.engine.models.facts import ModelFacts
    from fsdpbench.engine.models.families import Family

FIELD = "target_modules"


def resolve_targets(names: Sequence[str], facts: ModelFacts) -> tuple[str, ...]:
    """Return the names that get adapters, each of which ends the path of a linear layer.

    Raises ConfigError with every name that means none.
    """
    violations = list(check_targets(names, facts))
    if violations:
        raise ConfigError(violations)
    return tuple(names) or list_target_names(facts.family)


def list_target_names(family: Family) -> tuple[str, ...]:
    """List the last words of the paths of the linear layers, in the order of the family's row."""
    paths = (*family.column_parallel, *family.row_parallel)
    return tuple(dict.fromkeys(path.rpartition(".")[2] for path in paths))


def list_linear_layers(facts: ModelFacts) -> list[str]:
    """List the paths of the decoder's linear layers below the causal model."""
    family = facts.family
    paths = (*family.column_parallel, *family.row_parallel)
    return [f"{family.layers}.{n}.{path}" for n in range(facts.num_layers) for path in paths]


def is_target(path: str, names: Sequence[str]) -> bool:
    """Tell whether one of the names is the path or its end."""
    return any(path == name or path.endswith(f".{name}") for name in names)


def check_targets(names: Sequence[str], facts: ModelFacts) -> Iterator[Violation]:
    """Yield a violation for each name that no linear layer of the decoder has."""
    family = facts.family
    layers = list_linear_layers(facts)
    known = f"linear layers: {', '.join(list_target_names(family))}; none named means all of them"
    vocabulary = {family.embedding: "the embedding", family.head: "the head"}
    for name in names:
        if any(is_target(path, [name]) for path in layers):
            continue
        meant = next((what for path, what in vocabulary.items() if is_target(path, [name])), None)
        if meant is None:
            problem = f"is the name of no linear layer of this {facts.model_type} model"
        else:
            problem = f"is {meant}, which gets no adapter: its weight may be shared, and is cut"
            problem += " along the vocabulary by tensor parallelism"
        yield Violation(FIELD, repr(name), problem, known)


def count_adapter_weights(names: Sequence[str], rank: int, facts: ModelFacts) -> int:
    """Count the weights of adapters of this rank on the named layers (none named: on all)."""
    targets = [path for path in list_linear_layers(facts) if not names or is_target(path, names)]
    shapes = facts.linear_shapes
    return sum(rank * sum(shapes[path.rpartition(".")[2]]) for path in targets)
