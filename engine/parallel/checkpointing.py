"""Activation checkpointing by transformers' own switch: each decoder layer is computed again.

Parameter names do not change. transformers 5.17 checkpoints a layer's `__call__` and 5.24 its
`forward`; FSDP2 is at home with both. A selective policy keeps the outputs of some operators, so
that the second computation skips them (torch.utils.checkpoint, selective checkpointing).
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from fsdpbench.errors import ConfigError, Violation

if TYPE_CHECKING:
    from fsdpbench.engine.parallel.attention_kernels import AttentionKernel

MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear")


def apply_activation_checkpointing(
    backbone: PreTrainedModel, *, preserve_rng: bool, kept_operators: Collection[str] = ()
) -> None:
    """Keep only the layers' inputs in the forward pass of a model in training mode.

    `preserve_rng` makes the recomputation draw the same dropout; without any it only costs time.
    Outputs of `kept_operators` (as `aten::mm`) are kept too and not computed again.
    """
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng}
    if kept_operators:
        policy = partial(keep_outputs, frozenset(kept_operators))
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    # the method was renamed after 5.17, and the old name is deprecated
    enable = getattr(backbone, "activation_checkpointing_enable", None)
    enable = enable or backbone.gradient_checkpointing_enable
    enable(settings)
    # only reentrant checkpointing needs inputs with gradients, and the hook outlives training mode
    backbone.disable_input_require_grads()  # type: ignore[no-untyped-call]


def plan_kept_operators(policy: str, kernel: AttentionKernel) -> tuple[str, ...]:
    """Return the operators whose outputs a `gradient_checkpointing_policy` keeps.

    Raises ConfigError when attention is to be kept and its kernel is no operator that torch sees.
    """
    attention = policy in ("keep_attention", "keep_both")
    if attention and not kernel.operators:
        raise ConfigError(
            [
                Violation(
                    "gradient_checkpointing_policy",
                    repr(policy),
                    f"attention kernel {kernel.name} is no operator whose output torch can keep",
                    "use keep_matmul or full, or another attn_impl",
                )
            ]
        )
    kept = kernel.operators if attention else ()
    return kept + MATMULS if policy in ("keep_matmul", "keep_both") else kept


def keep_outputs(
    kept: frozenset[str],
    _context: SelectiveCheckpointContext,
    operator: Any,
    *_arguments: Any,
    **_keywords: Any,
) -> CheckpointPolicy:
    """Tell torch what to do with one operator's output."""
    if operator.name().partition(".")[0] in kept:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
