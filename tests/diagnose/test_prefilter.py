import random

import pytest

from fsdpbench.diagnose.prefilter import Prefilter, rarest_gram

LITERALS = [b"Traceback", b"out of memory", b"EADDRINUSE", b"WARN", b"node running low"]


def test_finds_what_a_plain_search_finds():
    rng = random.Random(3)
    words = [*LITERALS, *(rng.randbytes(9) for _ in range(30)), b"\n", b" "]
    block = b"".join(rng.choice(words) for _ in range(20_000))
    prefilter = Prefilter(LITERALS)
    found = {text: [] for text in LITERALS}
    for position in prefilter.find(block, 0, len(block)):
        for literal in prefilter.literals_at(block, position):
            offset = literal.index(rarest_gram(literal))
            if block.startswith(literal, position - offset):
                found[literal].append(position - offset)
    for literal in LITERALS:
        expected, start = [], block.find(literal)
        while start >= 0:
            expected.append(start)
            start = block.find(literal, start + 1)
        assert found[literal] == expected


def test_region_ends_are_kept():
    block = b"....WARN....WARN...."
    prefilter = Prefilter([b"WARN"])
    assert prefilter.find(block, 0, len(block)) == [4, 12]
    assert prefilter.find(block, 5, len(block)) == [12]
    assert prefilter.find(block, 0, 15) == [4]
    assert prefilter.find(block, 0, 2) == []
    assert prefilter.find(b"", 0, 0) == []


def test_background_is_avoided():
    assert rarest_gram(b"node running low on memory", b"node7: memory used") not in (
        b"node",
        b" mem",
    )
    with pytest.raises(ValueError, match="shorter"):
        rarest_gram(b"nan")
