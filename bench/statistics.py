"""What raw step times say: the median, how sure it is, and whether a machine was too noisy.

Pure functions over samples; no assumption of a normal distribution anywhere.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

UNSTABLE_SHARE = 0.10
"""A point is unstable if the 95 % interval of its median reaches further than this to one side."""


@dataclass(frozen=True)
class Summary:
    """A median with the order-statistics interval that covers it at 95 % (or all samples)."""

    num_samples: int
    median: float
    low: float
    high: float

    @property
    def relative_uncertainty(self) -> float:
        """The wider side of the interval as a share of the median."""
        if self.median == 0:
            return 0.0 if self.high == self.low else math.inf
        return max(self.high - self.median, self.median - self.low) / abs(self.median)


def summarize(samples: Sequence[float]) -> Summary | None:
    """Summarise samples; None if there are none or one of them is not finite."""
    if not samples or not all(math.isfinite(sample) for sample in samples):
        return None
    ordered = sorted(samples)
    lowest = interval_rank(len(ordered))
    return Summary(len(ordered), statistics.median(ordered), ordered[lowest], ordered[-1 - lowest])


def interval_rank(num_samples: int, confidence: float = 0.95) -> int:
    """Return the largest k for which the (k+1)-th smallest and largest cover the median.

    Below 6 samples no pair covers it at 95 %, so all samples are taken (k = 0). The number of
    samples under the median is binomial: coverage = 1 - 2 P(Binomial(n, 1/2) <= k).
    """
    tail, rank = 0.0, 0
    for k in range(num_samples // 2):
        tail += math.comb(num_samples, k) / 2**num_samples
        if 1 - 2 * tail < confidence:
            break
        rank = k
    return rank


def is_unstable(samples: Sequence[float]) -> bool:
    """Say whether the median of the samples is too uncertain to serve as a baseline."""
    summary = summarize(samples)
    return summary is None or summary.relative_uncertainty > UNSTABLE_SHARE
