"""Defaults and bounds of the micro-batch section."""

from __future__ import annotations

import pytest

from fsdpbench.engine.config.batching import MicroBatchSpec
from fsdpbench.errors import ConfigError


def test_defaults():
    assert MicroBatchSpec().model_dump() == {
        "n_mbs": 1,
        "granularity": 1,
        "max_tokens_per_mb": None,
        "n_mbs_divisor": 1,
        "packing_algorithm": "ffd",
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_mbs", 0),
        ("granularity", 0),
        ("max_tokens_per_mb", 0),
        ("n_mbs_divisor", 0),
        ("packing_algorithm", "lpt"),
    ],
)
def test_bounds(field, value):
    with pytest.raises(ConfigError) as caught:
        MicroBatchSpec(**{field: value})
    assert [v.where for v in caught.value.violations] == [field]
