"""Rules of a save or load."""

from __future__ import annotations

import pytest

from fsdpbench.engine.config.checkpoint import SaveLoadMeta
from fsdpbench.errors import ConfigError


def test_defaults():
    meta = SaveLoadMeta(path="/somewhere")
    assert (meta.path, meta.weight_format) == ("/somewhere", "hf")
    assert not meta.with_optim
    assert not meta.asynchronous


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({}, "path"),
        ({"path": ""}, "path"),
        ({"path": "x", "weight_format": "safetensors"}, "weight_format"),
        ({"path": "x", "weight_format": "adapter", "with_optim": True}, "with_optim"),
        ({"path": "x", "asynchronous": True}, "asynchronous"),
        ({"path": "x", "weight_format": "adapter", "asynchronous": True}, "asynchronous"),
    ],
)
def test_refusals(values, where):
    with pytest.raises(ConfigError) as caught:
        SaveLoadMeta(**values)
    assert [v.where for v in caught.value.violations] == [where]


@pytest.mark.parametrize("weight_format", ["hf", "dcp"])
def test_whole_models_may_hold_the_optimizer(weight_format):
    assert SaveLoadMeta(path="x", weight_format=weight_format, with_optim=True).with_optim


def test_dcp_may_be_written_in_the_background():
    assert SaveLoadMeta(path="x", weight_format="dcp", asynchronous=True).asynchronous
