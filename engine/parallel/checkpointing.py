"""Activation checkpointing by transformers' own switch: each decoder layer is computed again.

Parameter names do not change. transformers 5.17 checkpoints a layer's `__call__` and 5.24 its
`forward`; FSDP2 is at home with both.
"""

from __future__ import annotations

from transformers import PreTrainedModel


def apply_activation_checkpointing(backbone: PreTrainedModel, *, preserve_rng: bool) -> None:
    """Keep only the layers' inputs in the forward pass of a model in training mode.

    `preserve_rng` makes the recomputation draw the same dropout; without any it only costs time.
    """
    # the method was renamed after 5.17, and the old name is deprecated
    enable = getattr(backbone, "activation_checkpointing_enable", None)
    enable = enable or backbone.gradient_checkpointing_enable
    enable({"use_reentrant": False, "preserve_rng_state": preserve_rng})
    # only reentrant checkpointing needs inputs with gradients, and the hook outlives training mode
    backbone.disable_input_require_grads()  # type: ignore[no-untyped-call]
