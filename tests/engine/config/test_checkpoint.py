"""Rules of a save or load."""

from __future__ import annotations

import pytest

from fsdpbench.engine.config.checkpoint import SaveLoadMeta
from fsdpbench.errors import ConfigError


def test_defaults():
    meta = SaveLoadMeta(path="/somewhere")
    assert (meta.path, meta.weight_format, meta.with_optim) == ("/somewhere", "hf", False)


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({}, "path"),
        ({"path": ""}, "path"),
        ({"path": "x", "weight_format": "safetensors"}, "weight_format"),
        ({"path": "x", "with_optim": True}, "with_optim"),
    ],
)
def test_refusals(values, where):
    with pytest.raises(ConfigError) as caught:
        SaveLoadMeta(**values)
    assert [v.where for v in caught.value.violations] == [where]


def test_dcp_may_hold_the_optimizer():
    assert SaveLoadMeta(path="x", weight_format="dcp", with_optim=True).with_optim
