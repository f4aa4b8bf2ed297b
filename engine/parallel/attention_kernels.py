"""Packed causal attention kernels, one per operator; each isolates the sequences of the row.

A kernel takes query [T, H, D] and key, value [T, H_kv, D] of a packed row and the row's layout, and
returns [T, H, D]. Query head h uses key/value head h // (H / H_kv). Which kernel serves a
configuration is decided in `attention`; a kernel knows neither models nor ranks, and names its
operator, so that a simulated device sees what a real one would run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional


@dataclass(frozen=True)
class PackedLayout:
    """Where sequences lie in a packed row, and how scores are scaled and masked."""

    cu_seqlens: torch.Tensor  # int32 [sequences + 1], on the device
    sequence_lengths: tuple[int, ...]  # the same on the host; padding is a sequence of its own
    scaling: float
    sliding_window: int | None = None  # a token sees itself and the window - 1 before it
    dropout: float = 0.0

    @property
    def max_seqlen(self) -> int:
        """Longest sequence of the row."""
        return max(self.sequence_lengths)

    @property
    def window(self) -> tuple[int, int]:
        """Tokens seen to the left and to the right, as flash kernels want it; -1 is no bound."""
        return (-1 if self.sliding_window is None else self.sliding_window - 1, 0)


KernelFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PackedLayout], torch.Tensor]


@dataclass(frozen=True)
class AttentionKernel:
    """A kernel under the name that records show."""

    name: str
    run: KernelFunction
    has_dropout: bool = False
    operators: tuple[str, ...] = ()  # names under which torch's dispatcher sees it; none: unseen


def cpu_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackedLayout
) -> torch.Tensor:
    """Torch's exact CPU kernel, one call a sequence; float32 and bfloat16."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = _additive_window_mask(q, layout)
        output: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, mask is None, attn_mask=mask, scale=layout.scaling
        )[0]
        return output

    return _attend_by_sequence(attend, query, key, value, layout)


def sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackedLayout
) -> torch.Tensor:
    """Torch's scaled_dot_product_attention, one call a sequence; torch picks its kernel."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = _additive_window_mask(q, layout)
        return functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=layout.dropout,
            is_causal=mask is None,
            scale=layout.scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )

    return _attend_by_sequence(attend, query, key, value, layout)


def eager(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackedLayout
) -> torch.Tensor:
    """Matrix products and an fp32 softmax, one sequence at a time; quadratic memory."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) * layout.scaling
        scores = scores.masked_fill(~_visible(q.shape[2], layout, q.device), float("-inf"))
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(functional.dropout(weights, layout.dropout), v)

    return _attend_by_sequence(attend, query, key, value, layout)


def load_varlen_attn() -> AttentionKernel:
    """Torch's own packed flash kernel; half precision, on an accelerator."""
    from torch.nn.attention.varlen import varlen_attn

    names = inspect.signature(varlen_attn).parameters
    # torch 2.11 takes fewer key/value heads as they are; later versions ask for the flag
    extra: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in names else {}

    def run(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackedLayout
    ) -> torch.Tensor:
        bounds, longest = layout.cu_seqlens, layout.max_seqlen
        output: Any = varlen_attn(  # a tensor: more comes only if asked for
            query,
            key,
            value,
            bounds,
            bounds,
            longest,
            longest,
            scale=layout.scaling,
            window_size=layout.window,
            **extra,
        )
        attended: torch.Tensor = output
        return attended

    return AttentionKernel("varlen_attn", run, operators=("torch_attn::_varlen_attn",))


def wrap_flash_package(name: str, function: Callable[..., Any]) -> AttentionKernel:
    """Wrap a `flash_attn_varlen_func` of the flash-attn family (2, 3, 4 or a hub kernel)."""
    unbounded = None if name == "flash_attn_4" else -1  # version 4 writes "no bound" as None

    def run(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackedLayout
    ) -> torch.Tensor:
        left, right = layout.window
        output = function(
            query,
            key,
            value,
            cu_seqlens_q=layout.cu_seqlens,
            cu_seqlens_k=layout.cu_seqlens,
            max_seqlen_q=layout.max_seqlen,
            max_seqlen_k=layout.max_seqlen,
            softmax_scale=layout.scaling,
            causal=True,
            window_size=(unbounded if left < 0 else left, unbounded if left < 0 else right),
        )
        attended: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return attended

    # version 2 is a custom operator; the others call their extension past torch's dispatcher
    seen = ("flash_attn::_flash_attn_varlen_forward",) if name == "flash_attn" else ()
    return AttentionKernel(name, run, operators=seen)


def _attend_by_sequence(
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
) -> torch.Tensor:
    """Cut the row into its sequences and run `attend` on [1, H, L, D] of each."""
    lengths = list(layout.sequence_lengths)
    rows = [x.transpose(0, 1)[None] for x in (query, key, value)]
    queries, keys, values = (torch.split(row, lengths, dim=2) for row in rows)
    outputs = [attend(q, k, v) for q, k, v in zip(queries, keys, values, strict=True)]
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


def _visible(length: int, layout: PackedLayout, device: torch.device) -> torch.Tensor:
    """Bool [L, L]: which keys a query sees."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    seen = distance >= 0
    return seen if layout.sliding_window is None else seen & (distance < layout.sliding_window)


def _additive_window_mask(query: torch.Tensor, layout: PackedLayout) -> torch.Tensor | None:
    """None where plain causality says it all, else [L, L] of 0 and -inf in the query's type."""
    length = query.shape[2]
    if layout.sliding_window is None or length <= layout.sliding_window:
        return None
    mask = torch.zeros(length, length, dtype=query.dtype, device=query.device)
    return mask.masked_fill(~_visible(length, layout, query.device), float("-inf"))
