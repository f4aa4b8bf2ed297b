"""Build a transformers model whose parameters are shapes without storage; buffers are real.

A plain `torch.device("meta")` would lose the buffers that constructors compute (rotary frequencies,
embedding scales), so only what will be overwritten anyway goes to the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from fsdpbench.engine.parallel.attention import register_packed_attention
from fsdpbench.errors import ConfigError, Violation


def build_meta_backbone(
    hf_config: PreTrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """Return the causal model, and the values its constructor gave to vectors (norm weights).

    The model calls our packed attention, hence works with an `AttentionContext` only.
    """
    with EmptyOnMeta():
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            hf_config,
            dtype=dtype,
            attn_implementation=register_packed_attention(),
            trust_remote_code=trust_remote_code,
        )
    check_own_model_code(model)
    return model, move_parameters_to_meta(model)


def check_own_model_code(model: nn.Module) -> None:
    """Refuse a class that came with the weights: its attention would not isolate sequences."""
    kind = type(model)
    if kind.__module__.startswith("transformers.models."):
        return
    found = f"{kind.__module__}.{kind.__qualname__}"
    allowed = "the model must be one of transformers' own, whose attention calls ours"
    remedy = "set it to false: this model type needs no code of its own"
    raise ConfigError(
        [Violation("trust_remote_code", f"True, which brings {found}", allowed, remedy)]
    )


class EmptyOnMeta(TorchFunctionMode):
    """Within it `torch.empty`, which every matrix starts from, allocates nothing."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def move_parameters_to_meta(model: nn.Module) -> dict[str, torch.Tensor]:
    """Replace parameters that have storage by meta ones; return what they held, by name."""
    values = {n: p.detach() for n, p in model.named_parameters() if not p.is_meta}
    for name, value in values.items():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner).register_parameter(
            leaf, nn.Parameter(torch.empty_like(value, device="meta"))
        )
    return values
