"""Defaults and bounds of the optimizer section."""

from __future__ import annotations

import pytest

from fsdpbench.engine.config.optimizer import OptimizerConfig
from fsdpbench.errors import ConfigError


def test_defaults():
    assert OptimizerConfig().model_dump() == {
        "type": "adam",
        "lr": 1e-3,
        "weight_decay": 0.01,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "lr_scheduler_type": "constant",
        "warmup_steps_proportion": 0.001,
        "min_lr_ratio": 0.0,
        "gradient_clipping": 1.0,
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("type", "adamw"),
        ("lr", -1e-3),
        ("weight_decay", -0.1),
        ("beta1", 1.0),
        ("beta2", 1.0),
        ("eps", 0),
        ("lr_scheduler_type", "wsd"),
        ("warmup_steps_proportion", 1.5),
        ("min_lr_ratio", -0.1),
        ("gradient_clipping", 0),
    ],
)
def test_bounds(field, value):
    with pytest.raises(ConfigError) as caught:
        OptimizerConfig(**{field: value})
    assert [v.where for v in caught.value.violations] == [field]


@pytest.mark.parametrize("kind", ["adam", "adam_bf16", "sgd"])
def test_kinds(kind):
    assert OptimizerConfig(type=kind).type == kind
