"""Log-probabilities and entropy of a vocabulary-parallel head without whole logits.

`fused_logprobs` starts from hidden states, `gather_logprobs*` from given logits. See the note below
for the schedule of the fused one. Ignored tokens (label -100) get 0, with gradients exactly 0.

Shapes: T tokens, H hidden, V local vocabulary (this rank's shard), K columns of a tile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from fsdpbench.engine.batching.containers import IGNORED_LABEL
from fsdpbench.engine.ops.chunked import Span, plan_spans, plan_vocab_spans
from fsdpbench.engine.ops.vocab_softmax import (
    SoftmaxGradients,
    SoftmaxStatistics,
    concatenate_tokens,
    locate_labels,
    measure_tile,
    merge_tiles,
    reduce_shards,
)

# Note [Tiles over the vocabulary]
# Logits exist one [T, K] tile at a time, K chosen so that T x K = chunk_size x V. Cutting V instead
# of T costs the same memory and the same products, but in the backward each tile yields its rows of
# the weight's gradient complete, rounded once; only the hidden gradient accumulates over tiles, in
# fp32. Cutting T would accumulate the weight's gradient: an fp32 [V, H] buffer, V / T times larger,
# or one rounding per chunk in bf16 (measured: 3 times the error of one rounding at 16 chunks, 6
# times at 64). Forward: the tiles' statistics are merged online, then over ranks. Backward: the
# tile's logits are computed again.


def fused_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    tp_group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    with_entropy: bool = False,
    logit_softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log p(labels) and the entropy of softmax(softcap(hidden @ weight.T) / temperature).

    hidden [T, H], weight [V, H] whose row 0 is token `vocab_start`, labels [T] of global token ids
    or -100; results [T] in fp32 (float64 for float64 inputs), equal on all tp ranks. At most about
    chunk_size x V logits are alive at a time, in the backward too. The gradient of `hidden` is this
    rank's part of a sum over tp, which the caller takes; that of `weight` is whole.
    Collective over: tp (forward only).
    """
    head = _Head(temperature, chunk_size, tp_group, vocab_start, with_entropy, logit_softcap)
    run: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = _FusedLogprobs.apply
    return run(hidden, weight, labels, head)


def gather_logprobs(
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    chunk_size: int = 1024,
) -> torch.Tensor:
    """Return log p(labels) [...] in fp32 from logits [..., V], computed in chunks of tokens.

    With a tp group the vocabulary is sharded: ranks hold equal shards in rank order, and each
    receives its own shard's gradient.
    Collective over: tp (forward only).
    """
    return _gather(logits, labels, temperature, tp_group, chunk_size, with_entropy=False)[0]


def gather_logprobs_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    chunk_size: int = 1024,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log p(labels) and the entropy, both as `gather_logprobs` does.

    Collective over: tp (forward only).
    """
    logprobs, entropy = _gather(
        logits, labels, temperature, tp_group, chunk_size, with_entropy=True
    )
    assert entropy is not None
    return logprobs, entropy


@dataclass(frozen=True)
class _Head:
    """What stands between hidden states and probabilities."""

    temperature: float
    chunk_size: int
    tp_group: dist.ProcessGroup | None
    vocab_start: int
    with_entropy: bool
    logit_softcap: float | None

    def compute_tile(self, hidden_TH: torch.Tensor, weight_KH: torch.Tensor) -> torch.Tensor:
        """[T, K] logits in the accumulation type, before the softcap."""
        return _multiply(hidden_TH, weight_KH.t())

    def shape_tile(self, raw_TK: torch.Tensor) -> torch.Tensor:
        """Apply softcap and temperature in place."""
        if self.logit_softcap is not None:
            raw_TK.div_(self.logit_softcap).tanh_().mul_(self.logit_softcap)
        return raw_TK if self.temperature == 1.0 else raw_TK.div_(self.temperature)

    def slope_tile(self, shaped_TK: torch.Tensor) -> torch.Tensor | None:
        """Return d shaped / d raw but for the temperature, as a new tile; None if it is 1."""
        if self.logit_softcap is None:
            return None
        tanh = shaped_TK * (self.temperature / self.logit_softcap)
        return tanh.square_().neg_().add_(1.0)


class _FusedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, head: _Head
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        spans = plan_vocab_spans(hidden.shape[0], weight.shape[0], head.chunk_size)
        local = functools.reduce(
            merge_tiles, (_measure_span(hidden, weight, labels, head, span) for span in spans)
        )
        statistics = reduce_shards(local, head.tp_group)
        logprobs, entropy = statistics.logprobs, statistics.entropy
        ctx.set_materialize_grads(False)
        ctx.head, ctx.spans = head, spans
        ctx.save_for_backward(hidden, weight, labels, statistics.logsumexp, logprobs, entropy)
        return _mask_results(labels, logprobs, entropy)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        hidden, weight, labels, *saved = ctx.saved_tensors
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None, None
        gradients = _mask_gradients(labels, saved, grad_logprobs, grad_entropy, ctx.head)
        grad_hidden = torch.zeros_like(hidden, dtype=saved[0].dtype)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for start, stop in ctx.spans:
            grad_TK = _differentiate_span(
                hidden, weight, labels, ctx.head, (start, stop), gradients
            )
            if ctx.needs_input_grad[0]:
                grad_hidden += _multiply(grad_TK, weight[start:stop])
            if grad_weight is not None:
                torch.mm(grad_TK.t(), hidden, out=grad_weight[start:stop])
            del grad_TK  # or it would live on beside the next tile
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None, None
        return grad_hidden.to(hidden.dtype), grad_weight, None, None


def _measure_span(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, head: _Head, span: Span
) -> SoftmaxStatistics:
    start, stop = span
    logits = head.shape_tile(head.compute_tile(hidden, weight[start:stop]))
    columns, inside = locate_labels(labels, head.vocab_start + start, head.vocab_start + stop)
    return measure_tile(logits, columns, inside, with_entropy=head.with_entropy)


def _differentiate_span(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    head: _Head,
    span: Span,
    gradients: SoftmaxGradients,
) -> torch.Tensor:
    """[T, K] gradient of the raw logits, in the model's type."""
    start, stop = span
    logits = head.shape_tile(head.compute_tile(hidden, weight[start:stop]))
    slope = head.slope_tile(logits)
    columns, inside = locate_labels(labels, head.vocab_start + start, head.vocab_start + stop)
    return gradients.differentiate_tile(logits, columns, inside, dtype=hidden.dtype, slope_NK=slope)


def _multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Matrix product whose result is not rounded to a 16-bit type of its inputs."""
    if left.dtype in (torch.float32, torch.float64):
        return torch.mm(left, right)
    if left.device.type == "cpu":  # has no aten::mm.dtype; the copies are of one tile's size
        return torch.mm(left.float(), right.float())
    return torch.mm(left, right, out_dtype=torch.float32)


def _mask_results(
    labels: torch.Tensor, logprobs: torch.Tensor, entropy: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    kept = labels != IGNORED_LABEL
    return (
        torch.where(kept, logprobs, 0.0),
        None if entropy is None else torch.where(kept, entropy, 0.0),
    )


def _mask_gradients(
    labels: torch.Tensor,
    saved: list[torch.Tensor],
    grad_logprobs: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    head: _Head,
) -> SoftmaxGradients:
    """Gradients of the logits before the temperature, 0 on ignored tokens."""
    logsumexp, logprobs, entropy = saved
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(logsumexp)
    grad_logprobs, grad_entropy = _mask_results(labels, grad_logprobs, grad_entropy)
    return SoftmaxGradients(
        logsumexp,
        logprobs,
        entropy,
        grad_logprobs / head.temperature,
        None if grad_entropy is None else grad_entropy / head.temperature,
    )


def _gather(
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    tp_group: dist.ProcessGroup | None,
    chunk_size: int,
    *,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    vocab_start = 0 if tp_group is None else tp_group.rank() * logits.shape[-1]
    head = _Head(temperature, chunk_size, tp_group, vocab_start, with_entropy, None)
    run: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = _GatheredLogprobs.apply
    logprobs, entropy = run(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), head)
    return logprobs.view(labels.shape), None if entropy is None else entropy.view(labels.shape)


class _GatheredLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, head: _Head
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        vocab_stop = head.vocab_start + logits.shape[1]
        spans = plan_spans(logits.shape[0], head.chunk_size)
        parts = [
            measure_tile(
                head.shape_tile(_copy_to_float(logits[start:stop])),
                *locate_labels(labels[start:stop], head.vocab_start, vocab_stop),
                with_entropy=head.with_entropy,
            )
            for start, stop in spans
        ]
        statistics = reduce_shards(concatenate_tokens(parts), head.tp_group)
        logprobs, entropy = statistics.logprobs, statistics.entropy
        ctx.set_materialize_grads(False)
        ctx.head, ctx.spans = head, spans
        ctx.save_for_backward(logits, labels, statistics.logsumexp, logprobs, entropy)
        return _mask_results(labels, logprobs, entropy)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None]:
        logits, labels, *saved = ctx.saved_tensors
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None
        gradients = _mask_gradients(labels, saved, grad_logprobs, grad_entropy, ctx.head)
        vocab_start, vocab_stop = ctx.head.vocab_start, ctx.head.vocab_start + logits.shape[1]
        grad_logits = torch.empty_like(logits)
        for start, stop in ctx.spans:
            shaped = ctx.head.shape_tile(_copy_to_float(logits[start:stop]))
            grad_logits[start:stop] = gradients.select(start, stop).differentiate_tile(
                shaped,
                *locate_labels(labels[start:stop], vocab_start, vocab_stop),
                dtype=logits.dtype,
            )
        return grad_logits, None, None


def _copy_to_float(logits: torch.Tensor) -> torch.Tensor:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.to(dtype, copy=True)
