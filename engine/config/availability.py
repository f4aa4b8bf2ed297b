"""Fields and kinds that are accepted although this release cannot do what they ask for: a table.

Configurations are validated without it, so that files stay readable; building an engine refuses.
`find_ignored` lists what is set and changes nothing, so that no run differs silently from its file.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

from fsdpbench.engine.config.run import RunConfig
from fsdpbench.engine.config.strict import place_inside
from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.errors import Violation

# dotted path of a switch -> what to do instead
UNAVAILABLE = {
    "fsdp.shard_vision_across_sp": "vision models cannot be trained yet",
    "enable_tree_training": "pack the sequences as they are",
    "is_critic": "train the language-model head",
}
UNAVAILABLE_KINDS = ("grpo", "ppo", "rw", "dpo")

# dotted paths that do nothing -> when -> why
IGNORED: tuple[tuple[tuple[str, ...], Callable[[TrainEngineConfig], bool], str], ...] = (
    (
        ("lora_rank", "lora_alpha", "target_modules"),
        lambda config: not config.use_lora,
        "use_lora is false",
    ),
    (
        ("fsdp.optim_step_prefetch_layers",),
        lambda config: not config.fsdp.per_layer_optim_step,
        "fsdp.per_layer_optim_step is false",
    ),
    (
        ("grad_reduce_dtype",),
        lambda config: config.optimizer is None,
        "optimizer is null: nothing is trained",
    ),
    (
        ("gradient_checkpointing_policy",),
        lambda config: not config.gradient_checkpointing,
        "gradient_checkpointing is false",
    ),
    (
        ("fsdp.shard_vision_across_sp",),
        lambda config: config.fsdp.shard_vision_across_sp and config.context_parallel_size == 1,
        "context_parallel_size is 1",
    ),
    (
        ("optimizer.beta1", "optimizer.beta2", "optimizer.eps"),
        lambda config: config.optimizer is not None and config.optimizer.type == "sgd",
        "optimizer.type is sgd",
    ),
    (
        ("optimizer.min_lr_ratio",),
        lambda config: (
            config.optimizer is not None and config.optimizer.lr_scheduler_type == "constant"
        ),
        "optimizer.lr_scheduler_type is constant",
    ),
)


def find_unavailable(config: TrainEngineConfig | RunConfig) -> list[Violation]:
    """List the switches and the kind of run that are asked for and not available yet."""
    if isinstance(config, RunConfig):
        found = []
        if config.kind in UNAVAILABLE_KINDS:
            remedy = "available: sft, sweep"
            found.append(Violation("kind", repr(config.kind), "is not available yet", remedy))
        for name, engine in config.engines.items():
            found += [place_inside(name, v) for v in find_unavailable(engine)]
        return found
    return [
        Violation(path, "True", "is not available yet", f"set it to false; {remedy}")
        for path, remedy in UNAVAILABLE.items()
        if reduce(getattr, path.split("."), config)
    ]


def find_ignored(config: TrainEngineConfig) -> list[Violation]:
    """List the fields that differ from their defaults though another makes them do nothing."""
    return [
        Violation(path, "", f"has no effect: {reason}")
        for paths, is_ignored, reason in IGNORED
        if is_ignored(config)
        for path in paths
        if _is_set(config, path)
    ]


def _is_set(config: TrainEngineConfig, path: str) -> bool:
    *parents, last = path.split(".")
    section = reduce(getattr, parents, config)
    default = type(section).model_fields[last].get_default(call_default_factory=True)
    return bool(getattr(section, last) != default)
