"""Fields that are accepted although this release cannot do what they ask for: a table.

Configurations are validated without it, so that files stay readable; building an engine refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.errors import Violation

# dotted path of a switch -> what to do instead
UNAVAILABLE = {
    "fsdp.memory_efficient_load": "weights are streamed into the shards without it",
    "fsdp.per_layer_optim_step": "use fsdp.offload_params to keep the states in host memory",
    "fsdp.shard_vision_across_sp": "vision models cannot be trained yet",
    "use_lora": "train all weights",
    "enable_tree_training": "pack the sequences as they are",
    "is_critic": "train the language-model head",
}


def find_unavailable(config: TrainEngineConfig, prefix: str = "") -> list[Violation]:
    """List the switches that are on and not available yet; `prefix` precedes the field paths."""
    return list(_iterate(config, prefix))


def _iterate(config: TrainEngineConfig, prefix: str) -> Iterator[Violation]:
    for path, remedy in UNAVAILABLE.items():
        if reduce(getattr, path.split("."), config):
            yield Violation(
                prefix + path, "True", "is not available yet", f"set it to false; {remedy}"
            )
