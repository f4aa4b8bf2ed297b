"""Rules over a configuration together with the world size, the model and the machine.

Pure arithmetic: nothing is started and no torch is imported, so a laptop can check any cluster.
"""

from __future__ import annotations

from collections.abc import Iterator

from fsdpbench.engine.config.availability import find_unavailable
from fsdpbench.engine.config.parallel import FSDPParallelStrategy
from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.models.adapter_targets import check_targets
from fsdpbench.engine.models.facts import ModelFacts, read_model_facts
from fsdpbench.errors import ConfigError, Violation


def resolve_strategy(config: TrainEngineConfig, world_size: int) -> FSDPParallelStrategy:
    """Return the degrees of `backend`, or data parallel over the whole world when it is empty."""
    return config.parallel_strategy or FSDPParallelStrategy(data_parallel_size=world_size)


def find_violations(
    config: TrainEngineConfig,
    world_size: int,
    facts: ModelFacts | None,
    num_devices: int | None = None,
) -> list[Violation]:
    """List every broken rule; the model's rules are skipped when `facts` is None.

    `num_devices` counts the accelerators of all machines; None skips that rule.
    """
    strategy = resolve_strategy(config, world_size)
    found = [*_check_world(strategy, world_size, num_devices), *find_unavailable(config)]
    if facts is not None:
        found += _check_tensor_parallel(strategy.tp_size, facts)
        found += _check_context_parallel(strategy, facts)
        found += _check_model(config, facts)
    return found


def find_all_violations(
    config: TrainEngineConfig, world_size: int, num_devices: int | None = None
) -> list[Violation]:
    """Read the model at `path` and list every broken rule, an unreadable model among them."""
    try:
        facts = read_model_facts(config.path)
    except ConfigError as error:
        return [*find_violations(config, world_size, None, num_devices), *error.violations]
    return find_violations(config, world_size, facts, num_devices)


def _check_world(
    strategy: FSDPParallelStrategy, world_size: int, num_devices: int | None
) -> Iterator[Violation]:
    dp, cp, tp = strategy.dp_size, strategy.cp_size, strategy.tp_size
    if strategy.world_size != world_size:
        yield Violation(
            "backend",
            f"d{dp}c{cp}t{tp}",
            f"dp * cp * tp = {dp} * {cp} * {tp} = {strategy.world_size} must equal "
            f"world_size = {world_size}",
            _suggest_degree(strategy, world_size),
        )
    if num_devices is not None and world_size > num_devices:
        yield Violation(
            "world_size", str(world_size), f"must not exceed the {num_devices} devices found"
        )


def _suggest_degree(strategy: FSDPParallelStrategy, world_size: int) -> str:
    rest = strategy.cp_size * strategy.tp_size
    if world_size % rest == 0:
        return f"use d{world_size // rest} or start {strategy.world_size} ranks"
    return f"start {strategy.world_size} ranks or change the degrees"


def _check_tensor_parallel(tp: int, facts: ModelFacts) -> Iterator[Violation]:
    counts = {
        "num_attention_heads": facts.num_attention_heads,
        "num_key_value_heads": facts.num_key_value_heads,
        "intermediate_size": facts.intermediate_size,
        "vocab_size": facts.vocab_size,
    }
    for name, count in counts.items():
        if count % tp:
            yield Violation(
                "tensor_parallel_size",
                str(tp),
                f"must divide {name}={count} of the model",
                f"use {_list_degrees(facts)}",
            )


def _list_degrees(facts: ModelFacts) -> str:
    sizes = (facts.num_attention_heads, facts.intermediate_size, facts.vocab_size)
    kv = facts.num_key_value_heads
    fits = [str(tp) for tp in range(1, kv + 1) if not kv % tp and all(not s % tp for s in sizes)]
    return " or ".join([", ".join(fits[:-1]), fits[-1]] if len(fits) > 1 else fits)


def _check_context_parallel(
    strategy: FSDPParallelStrategy, facts: ModelFacts
) -> Iterator[Violation]:
    tp, cp = strategy.tp_size, strategy.cp_size
    if facts.num_attention_heads % tp or facts.num_key_value_heads % tp:
        return  # said already, and no number of local heads exists
    heads, kv = facts.num_attention_heads // tp, facts.num_key_value_heads // tp
    if heads % cp:
        yield Violation(
            "context_parallel_size",
            str(cp),
            f"must divide the {heads} attention heads of each tensor-parallel rank "
            f"(num_attention_heads={facts.num_attention_heads} / tp={tp})",
        )
    if kv % cp and cp % kv:
        yield Violation(
            "context_parallel_size",
            str(cp),
            f"must divide, or be a multiple of, the {kv} key-value heads of each "
            f"tensor-parallel rank (num_key_value_heads={facts.num_key_value_heads} / tp={tp})",
        )


def _check_model(config: TrainEngineConfig, facts: ModelFacts) -> Iterator[Violation]:
    policy = config.fsdp.wrap_policy
    names = (policy.transformer_layer_cls_to_wrap if policy else None) or ()
    known = facts.family.wrappable_classes
    for name in names:
        if name not in known:
            yield Violation(
                "fsdp.wrap_policy.transformer_layer_cls_to_wrap",
                repr(name),
                f"is no layer of this {facts.model_type} model",
                f"use {', '.join(known)}",
            )
    policy_name = config.gradient_checkpointing_policy
    inner = [name for name in names if name in known and name != facts.family.decoder_layer_cls]
    if inner and config.gradient_checkpointing and policy_name != "full":
        # torch counts the operators of a layer, and a unit within gathers in only one of the passes
        yield Violation(
            "gradient_checkpointing_policy",
            repr(policy_name),
            f"excludes units within a layer, found {', '.join(inner)} in fsdp.wrap_policy",
            f"set it to full, or wrap {facts.family.decoder_layer_cls}",
        )
    if config.use_lora:
        yield from check_targets(config.target_modules, facts)
    if facts.bidirectional:
        yield Violation(
            "path", repr(config.path), "attends in both directions", "causal models are trained"
        )
    if facts.attention_softcapping is not None:
        yield Violation(
            "path", repr(config.path), "soft-caps attention scores, which no kernel here does"
        )
