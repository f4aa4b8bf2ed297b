"""Finds lines that hold any of some hundred literals, in time independent of their number.

Each literal is known by its rarest four bytes. All four-byte windows of a block are hashed at once
and looked up in one table of 2^20 entries; only where a gram stands is its literal compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cache

import numpy as np

GRAM_BYTES = 4
_TABLE_BITS = 20
_MULTIPLIER = np.uint32(2654435761)
_SHIFT = np.uint32(32 - _TABLE_BITS)
_COMMON = b"etaoinsrhl "
_USUAL = b"dcumfpgwybvk_.:,-/=()[]0123456789"
_IN_BACKGROUND = 100  # worse than any gram of common letters


@cache
def rarest_gram(literal: bytes, background: bytes = b"") -> bytes:
    """Return the four bytes of the literal that text like `background` is least likely to hold."""
    if len(literal) < GRAM_BYTES:
        raise ValueError(f"{literal!r} is shorter than {GRAM_BYTES} bytes")
    grams = [literal[i : i + GRAM_BYTES] for i in range(len(literal) - GRAM_BYTES + 1)]
    return min(grams, key=lambda gram: _commonness(gram, background))


def _commonness(gram: bytes, background: bytes) -> int:
    letters = sum(4 if byte in _COMMON else 2 if byte in _USUAL else 0 for byte in gram)
    return letters + (_IN_BACKGROUND if gram in background else 0)


class Prefilter:
    """A table of grams, made once and used on every block."""

    def __init__(self, literals: Iterable[bytes], background: bytes = b"") -> None:
        self._literals: dict[bytes, list[bytes]] = defaultdict(list)
        for literal in sorted(set(literals)):
            self._literals[rarest_gram(literal, background)].append(literal)
        self._table = np.zeros(1 << _TABLE_BITS, dtype=np.bool_)
        if self._literals:
            grams = np.frombuffer(b"".join(self._literals), dtype="<u4")
            self._table[_hash(grams)] = True

    def find(self, block: bytes, start: int, end: int) -> list[int]:
        """Return the positions, rising, from `start` on where a literal's gram may stand."""
        num_windows = end - start - GRAM_BYTES + 1
        if num_windows <= 0:
            return []
        windows = np.ndarray((num_windows,), dtype="<u4", buffer=block, offset=start, strides=(1,))
        positions: list[int] = (np.flatnonzero(self._table[_hash(windows)]) + start).tolist()
        return positions

    def literals_at(self, block: bytes, position: int) -> list[bytes]:
        """Return the literals whose gram stands at the position; often none."""
        return self._literals.get(block[position : position + GRAM_BYTES], [])


def _hash(windows: np.ndarray) -> np.ndarray:
    return (windows * _MULTIPLIER) >> _SHIFT
