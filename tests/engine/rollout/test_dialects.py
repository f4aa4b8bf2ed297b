from __future__ import annotations

import pytest

from fsdpbench.engine.rollout.dialects import build_seed, check_unpadded, quote
from fsdpbench.engine.weight_sync.records import Bucket, TensorSpec
from fsdpbench.errors import WeightSyncError


def test_seeds_are_of_sequence_and_continuation():
    seeds = {build_seed(0, index, done) for index in range(8) for done in range(8)}
    assert len(seeds) == 64
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert build_seed(3, 1, 0) == build_seed(3, 1, 0)


def test_padded_buckets_are_refused_by_name():
    odd, even = TensorSpec("odd", (3,), "bfloat16"), TensorSpec("even", (8,), "bfloat16")
    check_unpadded(Bucket(0, (even,)))
    check_unpadded(Bucket(0, (odd,), packed=False))
    with pytest.raises(WeightSyncError, match=r"bucket 4: odd: .*packed=False"):
        check_unpadded(Bucket(4, (even, odd)))


def test_foreign_text_is_tamed():
    assert quote("a\x1b[31m\n\tb") == "a [31m b"
    assert len(quote("x" * 1000)) == 303
