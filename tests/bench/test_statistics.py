import itertools
import math
import random
import statistics

import pytest

from fsdpbench.bench.statistics import interval_rank, is_unstable, summarize


@pytest.mark.parametrize("num_samples", range(1, 13))
def test_the_interval_is_the_narrowest_that_covers_the_median(num_samples):
    def coverage(k):
        """Share of the 2^n ways to fall under or over the median in which the interval holds it."""
        held = sum(
            k < sum(signs) < num_samples - k
            for signs in itertools.product((0, 1), repeat=num_samples)
        )
        return held / 2**num_samples

    rank = interval_rank(num_samples)
    assert rank == 0 or coverage(rank) >= 0.95
    wider = (num_samples - 1) // 2 >= rank + 1
    assert not wider or coverage(rank + 1) < 0.95


def test_the_interval_covers_in_simulation():
    rng = random.Random(0)
    held = 0
    for _ in range(2000):
        summary = summarize([rng.expovariate(1.0) for _ in range(15)])
        held += summary.low <= math.log(2) <= summary.high
    assert held / 2000 > 0.94


def test_a_summary():
    summary = summarize([3.0, 1.0, 2.0, 4.0])
    assert (summary.num_samples, summary.median) == (4, 2.5)
    assert (summary.low, summary.high) == (1.0, 4.0)
    assert summary.relative_uncertainty == pytest.approx(0.6)
    assert summarize([]) is None
    assert summarize([1.0, math.nan]) is None


def test_unstable_is_a_matter_of_the_median_not_of_one_outlier():
    steady = [1.0, 1.01, 0.99, 1.0, 1.02, 1.0, 1.0, 0.98, 1.0, 1.0]
    assert not is_unstable(steady)
    assert not is_unstable([*steady, 9.0])
    assert is_unstable([1.0, 1.3, 0.7, 1.0, 1.3, 0.8, 1.25, 0.75, 1.1, 0.9])
    assert is_unstable([])
    assert statistics.median(steady) == 1.0
