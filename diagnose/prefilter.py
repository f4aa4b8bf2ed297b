"""Finds where any of some hundred literals may begin, in time independent of their number.

Each literal is known by its rarest four bytes. All four-byte windows of a block are hashed at once
and looked up in one table of 2^20 entries; what is found is a hint that the caller verifies.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

GRAM_BYTES = 4
_TABLE_BITS = 20
_MULTIPLIER = np.uint32(2654435761)
_SHIFT = np.uint32(32 - _TABLE_BITS)
_COMMON = b"etaoinsrhl "
_USUAL = b"dcumfpgwybvk_.:,-/=()[]0123456789"


def _commonness(gram: bytes) -> int:
    return sum(4 if byte in _COMMON else 2 if byte in _USUAL else 0 for byte in gram)


def rarest_gram(literal: bytes) -> bytes:
    """Return the four bytes of the literal that other text is least likely to hold."""
    if len(literal) < GRAM_BYTES:
        raise ValueError(f"{literal!r} is shorter than {GRAM_BYTES} bytes")
    grams = [literal[i : i + GRAM_BYTES] for i in range(len(literal) - GRAM_BYTES + 1)]
    return min(grams, key=_commonness)


class Prefilter:
    """A table of grams, made once and used on every block."""

    def __init__(self, literals: Iterable[bytes]) -> None:
        grams = sorted({rarest_gram(literal) for literal in literals})
        self._table = np.zeros(1 << _TABLE_BITS, dtype=np.bool_)
        if grams:
            self._table[_hash(np.frombuffer(b"".join(grams), dtype="<u4"))] = True

    def find(self, block: bytes | memoryview) -> list[int]:
        """Return the positions, rising, at which a literal's gram may stand."""
        if len(block) < GRAM_BYTES:
            return []
        raw = np.frombuffer(block, dtype=np.uint8)
        windows = raw[:-3].astype(np.uint32)
        for offset in range(1, GRAM_BYTES):
            part = raw[offset : len(raw) - 3 + offset].astype(np.uint32)
            windows |= part << np.uint32(8 * offset)
        positions: list[int] = np.flatnonzero(self._table[_hash(windows)]).tolist()
        return positions


def _hash(windows: np.ndarray) -> np.ndarray:
    return (windows * _MULTIPLIER) >> _SHIFT
