"""Partitions of sequences: properties over random lengths, and optima found by brute force."""

from __future__ import annotations

import itertools
import random

import pytest

from fsdpbench.engine.batching.partition import (
    partition_ffd,
    partition_kk,
    partition_kk_capped,
)
from fsdpbench.errors import ConfigError

CAPPED = {"ffd": partition_ffd, "kk": partition_kk_capped}


def loads_of(groups, lengths):
    return [sum(lengths[row] for row in group) for group in groups]


def best_loads(lengths, n_groups):
    """The least possible heaviest load, by trying every assignment."""
    return min(
        max(sum(n for n, g in zip(lengths, choice, strict=True) if g == k) for k in range(n_groups))
        for choice in itertools.product(range(n_groups), repeat=len(lengths))
    )


def fewest_groups(lengths, cap):
    return next(k for k in range(1, len(lengths) + 1) if best_loads(lengths, k) <= cap)


def random_lengths(rng, count, longest=100):
    return [rng.choice([1, rng.randint(1, longest), longest]) for _ in range(count)]


@pytest.mark.parametrize("algorithm", CAPPED)
@pytest.mark.parametrize("granularity", [1, 2, 3])
@pytest.mark.parametrize("divisor", [1, 2, 3])
def test_properties_over_random_lengths(algorithm, granularity, divisor):
    rng = random.Random(granularity * 10 + divisor)
    for _ in range(40):
        lengths = random_lengths(rng, granularity * rng.randint(1, 20))
        cap = rng.choice([None, granularity * 100, granularity * 150, granularity * 400])
        fewest = rng.randint(1, 6)
        groups = CAPPED[algorithm](lengths, cap, fewest, divisor, granularity)
        assert sorted(itertools.chain(*groups)) == list(range(len(lengths)))
        assert all(group == sorted(group) for group in groups)
        assert len(groups) >= fewest
        assert len(groups) % divisor == 0
        loads = loads_of(groups, lengths)
        assert loads == sorted(loads, reverse=True)
        assert cap is None or max(loads) <= cap
        for group in groups:
            units = [row // granularity for row in group]
            assert all(units.count(unit) == granularity for unit in units)
        units = len(lengths) // granularity
        assert sum(1 for group in groups if group) >= min(units, fewest)


@pytest.mark.parametrize("algorithm", CAPPED)
def test_every_number_above_the_natural_one_is_met_exactly(algorithm):
    rng = random.Random(7)
    for _ in range(60):
        lengths = random_lengths(rng, rng.randint(1, 12))
        natural = len(CAPPED[algorithm](lengths, 110))
        for count in range(natural, natural + 8):
            groups = CAPPED[algorithm](lengths, 110, count)
            assert len(groups) == count
            assert max(loads_of(groups, lengths)) <= 110
            assert sorted(itertools.chain(*groups)) == list(range(len(lengths)))


# Found by search: rebalancing a packing over one or two groups more would break the cap.
FULL_GROUPS = {
    "ffd": (16, 14, [7, 9] * 7 + [5, 5, 6] * 5),
    "kk": (20, 18, [6, 14] * 4 + [8, 12] * 5 + [5, 5, 10] * 7),
}


@pytest.mark.parametrize("algorithm", FULL_GROUPS)
def test_a_tight_packing_is_split_where_rebalancing_would_break_the_cap(algorithm):
    cap, count, lengths = FULL_GROUPS[algorithm]
    rebalanced = {"ffd": greedy_loads, "kk": kk_loads}[algorithm](lengths, count)
    assert max(rebalanced) > cap
    assert len(CAPPED[algorithm](lengths, cap)) < count
    groups = CAPPED[algorithm](lengths, cap, count)
    assert len(groups) == count
    assert max(loads_of(groups, lengths)) <= cap
    assert sorted(itertools.chain(*groups)) == list(range(len(lengths)))


def greedy_loads(lengths, n_groups):
    loads = [0] * n_groups
    for length in sorted(lengths, reverse=True):
        loads[loads.index(min(loads))] += length
    return loads


def kk_loads(lengths, n_groups):
    return loads_of(partition_kk(lengths, n_groups), lengths)


def test_ffd_stays_near_the_fewest_groups():
    rng = random.Random(3)
    for _ in range(20):
        lengths = [rng.randint(3, 8) for _ in range(5)]
        count = len(partition_ffd(lengths, 13))
        assert count <= 11 / 9 * fewest_groups(lengths, 13) + 6 / 9


@pytest.mark.parametrize("n_groups", [2, 3])
def test_kk_stays_near_the_best_balance(n_groups):
    rng = random.Random(n_groups)
    exact = 0
    for _ in range(12):
        lengths = [rng.randint(1, 50) for _ in range(6)]
        heaviest = max(loads_of(partition_kk(lengths, n_groups), lengths))
        best = best_loads(lengths, n_groups)
        assert heaviest <= (4 / 3 - 1 / (3 * n_groups)) * best
        exact += heaviest == best
    assert exact >= 4


def test_kk_beats_the_greedy_on_the_textbook_case():
    lengths = [8, 7, 6, 5, 4]
    assert loads_of(partition_kk(lengths, 2), lengths) == [16, 14]


def test_more_groups_than_sequences_leave_empty_groups_at_the_end():
    for partition in CAPPED.values():
        assert partition([3, 9], None, 4) == [[1], [0], [], []]
    assert partition_kk([3, 9], 3) == [[1], [0], []]


@pytest.mark.parametrize("algorithm", CAPPED)
def test_a_sequence_above_the_cap_is_named(algorithm):
    with pytest.raises(ConfigError) as caught:
        CAPPED[algorithm]([5, 130, 7, 101], 100)
    first, second = caught.value.violations
    assert first.where == "mb_spec.max_tokens_per_mb"
    assert "sequence 1 of 130 tokens" in str(first)
    assert "sequence 3 of 101 tokens" in str(second)
    assert "at least 130" in str(first)


@pytest.mark.parametrize("algorithm", CAPPED)
def test_a_pair_above_the_cap_is_named(algorithm):
    with pytest.raises(ConfigError, match=r"sequences 2-3 \(granularity 2\) of 60\+50 tokens"):
        CAPPED[algorithm]([5, 6, 60, 50], 100, granularity=2)


def test_granularity_must_divide_the_batch():
    with pytest.raises(ConfigError, match=r"mb_spec\.granularity=2: must divide the 3 sequences"):
        partition_ffd([1, 2, 3], 10, granularity=2)


def test_plans_are_deterministic_and_keep_ties_in_order():
    assert partition_ffd([4] * 6, 8) == [[0, 1], [2, 3], [4, 5]]
    assert partition_kk([4] * 4, 2) == partition_kk([4] * 4, 2)
