"""Records on the wire."""

from __future__ import annotations

import json

import pytest

from fsdpbench.engine.weight_sync.records import Bucket, TensorSpec

SPECS = (
    TensorSpec("a", (3, 5), "bfloat16"),
    TensorSpec("b", (), "float32"),
    TensorSpec("c", (8,), "float16"),
)


def test_tensors_of_a_packed_bucket_are_aligned():
    bucket = Bucket(0, SPECS)
    assert [spec.num_bytes for spec in SPECS] == [30, 4, 16]
    assert bucket.offsets == (0, 32, 48)
    assert bucket.num_bytes == 64


@pytest.mark.parametrize("packed", [True, False])
def test_a_bucket_travels_as_json(packed):
    bucket = Bucket(3, SPECS, packed)
    assert Bucket.from_json(json.loads(json.dumps(bucket.to_json()))) == bucket
