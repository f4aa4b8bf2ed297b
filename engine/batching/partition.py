"""Divide sequences into groups by token count: first-fit decreasing and Karmarkar-Karp. Pure.

A group is a list of row numbers in rising order; every row is in exactly one group. `granularity`
adjacent rows (the two answers of a preference pair, say) form one unit and stay together. Groups
come heaviest first and empty ones last: ranks that run their n-th groups in lockstep then wait
least for each other, and a group too big for the memory shows itself at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from fsdpbench.errors import ConfigError, Violation

Groups = list[list[int]]


def partition_ffd(
    lengths: Sequence[int],
    max_tokens: int | None,
    min_groups: int = 1,
    n_groups_divisor: int = 1,
    granularity: int = 1,
) -> Groups:
    """Fill as few groups as first-fit decreasing needs, none above `max_tokens` (None: no cap).

    The number of groups is raised to `min_groups` and to a multiple of `n_groups_divisor`. If units
    are fewer than groups, the rest stays empty.
    """
    weights = _weigh_units(lengths, granularity)
    _check_cap(lengths, weights, max_tokens, granularity)
    groups = _fill_first_fit(weights, max_tokens)
    target = _round_up(max(len(groups), min_groups, 1), n_groups_divisor)
    if target > len(groups):
        balanced = _place_on_lightest(weights, target)
        fits = _heaviest(balanced, weights) <= (max_tokens or sum(weights))
        groups = balanced if fits else _split_heaviest(groups, weights, target)
    return _expand_units(groups, weights, granularity)


def partition_kk(lengths: Sequence[int], n_groups: int, granularity: int = 1) -> Groups:
    """Balance the token counts of exactly `n_groups` groups by the largest differencing method."""
    weights = _weigh_units(lengths, granularity)
    return _expand_units(_difference(weights, n_groups), weights, granularity)


def partition_kk_capped(
    lengths: Sequence[int],
    max_tokens: int | None,
    min_groups: int = 1,
    n_groups_divisor: int = 1,
    granularity: int = 1,
) -> Groups:
    """Balance as `partition_kk`, over as few groups as keep each within `max_tokens`.

    The number of groups is raised to `min_groups` and to a multiple of `n_groups_divisor`.
    """
    weights = _weigh_units(lengths, granularity)
    _check_cap(lengths, weights, max_tokens, granularity)
    cap = max_tokens or max(sum(weights), 1)
    # A larger number of groups can turn out worse than a smaller one, so the least number that fits
    # is found from the total alone and only then raised to min_groups; see _split_heaviest.
    fewest = _round_up(max(-(-sum(weights) // cap), 1), n_groups_divisor)
    groups = _difference(weights, fewest)
    while _heaviest(groups, weights) > cap:
        fewest += n_groups_divisor
        groups = _difference(weights, fewest)
    target = _round_up(max(fewest, min_groups), n_groups_divisor)
    if target > fewest:
        balanced = _difference(weights, target)
        fits = _heaviest(balanced, weights) <= cap
        groups = balanced if fits else _split_heaviest(groups, weights, target)
    return _expand_units(groups, weights, granularity)


def _weigh_units(lengths: Sequence[int], granularity: int) -> list[int]:
    if len(lengths) % granularity:
        raise ConfigError(
            [
                Violation(
                    "mb_spec.granularity",
                    str(granularity),
                    f"must divide the {len(lengths)} sequences of the batch",
                )
            ]
        )
    return [sum(lengths[i : i + granularity]) for i in range(0, len(lengths), granularity)]


def _check_cap(
    lengths: Sequence[int], weights: list[int], max_tokens: int | None, granularity: int
) -> None:
    if max_tokens is None:
        return
    violations = []
    for unit, weight in enumerate(weights):
        if weight <= max_tokens:
            continue
        first = unit * granularity
        name = (
            f"sequence {first} of {weight} tokens"
            if granularity == 1
            else f"sequences {first}-{first + granularity - 1} (granularity {granularity}) of "
            f"{'+'.join(str(n) for n in lengths[first : first + granularity])} tokens"
        )
        remedy = f"raise max_tokens_per_mb to at least {max(weights)} or cut the sequence"
        violations.append(
            Violation("mb_spec.max_tokens_per_mb", str(max_tokens), f"{name} does not fit", remedy)
        )
    if violations:
        raise ConfigError(violations[:5])


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _heaviest(groups: Groups, weights: list[int]) -> int:
    return max((sum(weights[unit] for unit in group) for group in groups), default=0)


def _decreasing(weights: list[int]) -> list[int]:
    return sorted(range(len(weights)), key=lambda unit: -weights[unit])  # stable: ties by number


def _fill_first_fit(weights: list[int], cap: int | None) -> Groups:
    if cap is None:
        return [list(range(len(weights)))] if weights else []
    groups: Groups = []
    room: list[int] = []
    for unit in _decreasing(weights):
        for number, left in enumerate(room):
            if weights[unit] <= left:
                groups[number].append(unit)
                room[number] -= weights[unit]
                break
        else:
            groups.append([unit])
            room.append(cap - weights[unit])
    return groups


def _place_on_lightest(weights: list[int], n_groups: int) -> Groups:
    """Longest processing time first: the next heaviest unit goes to the lightest group."""
    groups: Groups = [[] for _ in range(n_groups)]
    heap = [(0, number) for number in range(n_groups)]
    for unit in _decreasing(weights):
        load, number = heapq.heappop(heap)
        groups[number].append(unit)
        heapq.heappush(heap, (load + weights[unit], number))
    return groups


def _split_heaviest(groups: Groups, weights: list[int], target: int) -> Groups:
    """Halve the heaviest divisible group until there are `target`; never makes a group heavier.

    This is the fallback that always keeps a cap that `groups` keep already, whatever the target.
    """
    groups = [list(group) for group in groups]
    while len(groups) < target:
        divisible = [number for number, group in enumerate(groups) if len(group) > 1]
        if not divisible:
            return groups + [[] for _ in range(target - len(groups))]
        number = max(divisible, key=lambda n: sum(weights[unit] for unit in groups[n]))
        group = groups.pop(number)
        halves = _place_on_lightest([weights[unit] for unit in group], 2)
        groups.extend([group[place] for place in half] for half in halves)
    return groups


def _difference(weights: list[int], n_groups: int) -> Groups:
    """k-way Karmarkar-Karp: merge the two partitions of largest spread, heavy onto light."""
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for number, unit in enumerate(_decreasing(weights)):
        parts: list[tuple[int, list[int]]] = [(weights[unit], [unit])]
        parts += [(0, []) for _ in range(n_groups - 1)]
        heap.append((parts[-1][0] - parts[0][0], number, parts))
    heapq.heapify(heap)
    number = len(weights)
    while len(heap) > 1:
        _, _, left = heapq.heappop(heap)
        _, _, right = heapq.heappop(heap)
        merged = [
            (heavy[0] + light[0], heavy[1] + light[1])
            for heavy, light in zip(left, reversed(right), strict=True)
        ]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
        number += 1
    if not heap:
        return [[] for _ in range(n_groups)]
    return [units for _, units in heap[0][2]]


def _expand_units(groups: Groups, weights: list[int], granularity: int) -> Groups:
    """Turn units into rows, in rising order; groups come heaviest first, empty ones last."""
    ordered = sorted(
        (sorted(group) for group in groups),
        key=lambda group: (not group, -sum(weights[unit] for unit in group), group),
    )
    return [
        [row for unit in group for row in range(unit * granularity, (unit + 1) * granularity)]
        for group in ordered
    ]
