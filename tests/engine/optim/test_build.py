"""Each kind of the configuration gives its optimizer, with the configuration's numbers."""

from __future__ import annotations

import pytest
import torch

from fsdpbench.engine.config.optimizer import OptimizerConfig
from fsdpbench.engine.optim.adamw import AdamW
from fsdpbench.engine.optim.anyprecision import AnyPrecisionAdamW
from fsdpbench.engine.optim.build import build_optimizer
from fsdpbench.engine.optim.sgd import SGD
from fsdpbench.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "cls"), [("adam", AdamW), ("adam_bf16", AnyPrecisionAdamW), ("sgd", SGD)]
)
def test_kinds_and_numbers(kind, cls):
    config = OptimizerConfig(type=kind, lr=0.5, weight_decay=0.25, beta1=0.5, beta2=0.75, eps=0.125)
    optimizer = build_optimizer([("w", torch.nn.Parameter(torch.ones(1)))], config)
    assert type(optimizer) is cls
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.25)
    if kind != "sgd":
        assert (group["betas"], group["eps"]) == ((0.5, 0.75), 0.125)


def test_takes_trainable_parameters_once():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    optimizer = build_optimizer(
        [*model.named_parameters(), ("tied", model[1].weight)], OptimizerConfig()
    )
    (group,) = optimizer.param_groups
    assert group["params"] == [model[0].weight, model[1].bias]


def test_refuses_master_weights_of_another_dtype():
    model = torch.nn.Linear(2, 2).to(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"optimizer_dtype=float32: .*weight is torch.bfloat16"):
        build_optimizer(model.named_parameters(), OptimizerConfig(), "float32")
    build_optimizer(model.named_parameters(), OptimizerConfig(), "bfloat16")


def test_refuses_a_frozen_model():
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter"):
        build_optimizer(model.named_parameters(), OptimizerConfig())
