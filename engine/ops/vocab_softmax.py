"""Softmax over a vocabulary that is seen tile by tile and may be sharded over ranks. Plain tensors.

Shapes: N tokens, K columns of a tile. Per token and part of the vocabulary four numbers suffice:
m = max z, s = sum exp(z - m), u = sum exp(z - m) (z - m), t = z at the label if it lies there.
Parts merge by rescaling to the common maximum, whether they are tiles of one rank or shards of
several. From the merged numbers: logsumexp = m + log s, log p(label) = t - logsumexp, and
entropy = log s - u / s. The gradient of a tile needs nothing from other tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(eq=False)
class SoftmaxStatistics:
    """The four numbers of each token over the part of the vocabulary seen so far."""

    maximum: torch.Tensor  # [N]
    sum_exp: torch.Tensor  # [N]
    weighted: torch.Tensor | None  # [N]; None if no entropy is wanted
    target: torch.Tensor  # [N]; 0 where the label lies elsewhere

    @property
    def logsumexp(self) -> torch.Tensor:
        """[N]."""
        return self.maximum + self.sum_exp.log()

    @property
    def logprobs(self) -> torch.Tensor:
        """[N]; where the label is nearly sure, exact beyond what t - logsumexp would keep."""
        return (self.target - self.maximum) - self.sum_exp.log()

    @property
    def entropy(self) -> torch.Tensor | None:
        """[N], or None if it was not measured."""
        if self.weighted is None:
            return None
        return self.sum_exp.log() - self.weighted / self.sum_exp


def locate_labels(labels: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the labels' columns within [start, stop), clamped, and whether they lie there."""
    columns = labels - start
    inside = (columns >= 0) & (columns < stop - start)
    return columns.clamp(0, stop - start - 1), inside


def measure_tile(
    logits_NK: torch.Tensor,
    columns_N: torch.Tensor,
    inside_N: torch.Tensor,
    *,
    with_entropy: bool,
) -> SoftmaxStatistics:
    """Measure one tile. Overwrites `logits_NK`."""
    target = logits_NK.gather(1, columns_N[:, None]).squeeze(1)
    target = torch.where(inside_N, target, 0.0)
    maximum = logits_NK.amax(dim=1)
    shifted = logits_NK.sub_(maximum[:, None])
    if not with_entropy:
        return SoftmaxStatistics(maximum, shifted.exp_().sum(dim=1), None, target)
    exponentials = shifted.exp()
    weighted = shifted.mul_(exponentials).sum(dim=1)
    return SoftmaxStatistics(maximum, exponentials.sum(dim=1), weighted, target)


def merge_tiles(left: SoftmaxStatistics, right: SoftmaxStatistics) -> SoftmaxStatistics:
    """Merge two disjoint parts of the vocabulary."""
    maximum = torch.maximum(left.maximum, right.maximum)
    left, right = _rescale(left, maximum), _rescale(right, maximum)
    weighted = None
    if left.weighted is not None and right.weighted is not None:
        weighted = left.weighted + right.weighted
    return SoftmaxStatistics(
        maximum, left.sum_exp + right.sum_exp, weighted, left.target + right.target
    )


def reduce_shards(
    statistics: SoftmaxStatistics, tp_group: dist.ProcessGroup | None
) -> SoftmaxStatistics:
    """Merge the ranks' shards of the vocabulary by one MAX and one SUM of a few numbers a token.

    Collective over: tp.
    """
    if tp_group is None or tp_group.size() == 1:
        return statistics
    maximum = statistics.maximum.clone()
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=tp_group)
    local = _rescale(statistics, maximum)
    parts = [local.sum_exp, local.target]
    if local.weighted is not None:
        parts.append(local.weighted)
    sums = torch.stack(parts)
    dist.all_reduce(sums, group=tp_group)
    weighted = None if local.weighted is None else sums[2]
    return SoftmaxStatistics(maximum, sums[0], weighted, sums[1])


def concatenate_tokens(parts: list[SoftmaxStatistics]) -> SoftmaxStatistics:
    """Join the statistics of successive tokens over the same part of the vocabulary."""
    weighted = [part.weighted for part in parts if part.weighted is not None]
    return SoftmaxStatistics(
        torch.cat([part.maximum for part in parts]),
        torch.cat([part.sum_exp for part in parts]),
        torch.cat(weighted) if weighted else None,
        torch.cat([part.target for part in parts]),
    )


def _rescale(part: SoftmaxStatistics, maximum: torch.Tensor) -> SoftmaxStatistics:
    shift = part.maximum - maximum
    scale = shift.exp()
    weighted = None if part.weighted is None else (part.weighted + part.sum_exp * shift) * scale
    return SoftmaxStatistics(maximum, part.sum_exp * scale, weighted, part.target)


@dataclass(frozen=True, eq=False)
class SoftmaxGradients:
    """What the gradient of any tile of logits needs of each token; all [N]."""

    logsumexp: torch.Tensor
    logprobs: torch.Tensor
    entropy: torch.Tensor | None
    grad_logprobs: torch.Tensor
    grad_entropy: torch.Tensor | None  # None if no gradient came through the entropy

    def select(self, start: int, stop: int) -> SoftmaxGradients:
        """Return the tokens [start, stop)."""
        return SoftmaxGradients(
            self.logsumexp[start:stop],
            self.logprobs[start:stop],
            None if self.entropy is None else self.entropy[start:stop],
            self.grad_logprobs[start:stop],
            None if self.grad_entropy is None else self.grad_entropy[start:stop],
        )

    def differentiate_tile(
        self,
        logits_NK: torch.Tensor,
        columns_N: torch.Tensor,
        inside_N: torch.Tensor,
        *,
        dtype: torch.dtype,
        slope_NK: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the gradient of a tile of logits, times `slope_NK`. Overwrites `logits_NK`.

        d logprob / dz_j = [j is the label] - p_j; d entropy / dz_j = -p_j (log p_j + entropy).
        The label's own entry is set from exact terms: adding 1 to a rounded -p would cancel.
        """
        log_probs = logits_NK.sub_(self.logsumexp[:, None])
        at_label = -torch.expm1(self.logprobs) * self.grad_logprobs
        if self.grad_entropy is None or self.entropy is None:
            probs, factor = log_probs.exp_(), self.grad_logprobs.neg()[:, None]
        else:
            at_label -= self.logprobs.exp() * (self.logprobs + self.entropy) * self.grad_entropy
            probs = log_probs.exp()
            factor = log_probs.add_(self.entropy[:, None]).mul_(self.grad_entropy.neg()[:, None])
            factor.sub_(self.grad_logprobs[:, None])
        if slope_NK is not None:
            probs.mul_(slope_NK)
            at_label *= slope_NK.gather(1, columns_N[:, None]).squeeze(1)
        # one pass that multiplies and rounds; in place where nothing is rounded
        grad = probs if probs.dtype == dtype else torch.empty_like(probs, dtype=dtype)
        torch.mul(probs, factor, out=grad)
        elsewhere = grad.gather(1, columns_N[:, None])
        return grad.scatter_(
            1,
            columns_N[:, None],
            torch.where(inside_N, at_label, elsewhere[:, 0])[:, None].to(dtype),
        )
