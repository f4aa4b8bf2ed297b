"""Only layers' inputs are kept, dropout included; the meshes are in test_parallelize."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdpbench.engine.parallel.attention import CPU_FLASH, EAGER, SDPA
from fsdpbench.engine.parallel.checkpointing import (
    MATMULS,
    apply_activation_checkpointing,
    plan_kept_operators,
)
from fsdpbench.errors import ConfigError


def build(dropout: float, attention: str = "eager"):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_dropout=dropout,
        pad_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()


def differentiate(model):
    """Gradients by name, and the bytes that autograd saved for the backward."""
    saved = []

    def pack(tensor):
        saved.append(tensor.numel() * tensor.element_size())
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=torch.arange(16)[None]).logits.square().sum()
    saved_bytes = sum(saved)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, saved_bytes


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradients_stay_and_memory_falls(dropout):
    model = build(dropout)
    plain, plain_bytes = differentiate(model)
    model.zero_grad()
    apply_activation_checkpointing(model, preserve_rng=dropout > 0)
    again, bytes_now = differentiate(model)
    assert bytes_now < 0.5 * plain_bytes
    for name, gradient in plain.items():
        assert torch.equal(gradient, again[name]), name


class CountOperators(TorchDispatchMode):
    """Counts what runs below autograd."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def count_operators(model):
    loss = model(input_ids=torch.arange(16)[None]).logits.square().sum()
    with CountOperators() as counter:
        loss.backward()
    return counter.counts


ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize(
    ("policy", "recomputes_matmul", "recomputes_attention"),
    [
        ("full", True, True),
        ("keep_attention", True, False),
        ("keep_matmul", False, True),
        ("keep_both", False, False),
    ],
)
def test_a_policy_spares_its_operators_alone(policy, recomputes_matmul, recomputes_attention):
    plain = build(0.0, "sdpa")
    model = build(0.0, "sdpa")
    kept = plan_kept_operators(policy, CPU_FLASH)
    apply_activation_checkpointing(model, preserve_rng=False, kept_operators=kept)
    without, now = count_operators(plain), count_operators(model)
    assert (now["aten::mm"] > without["aten::mm"]) is recomputes_matmul
    assert (now[ATTENTION] > 0) is recomputes_attention
    for (name, parameter), (_, other) in zip(
        plain.named_parameters(), model.named_parameters(), strict=True
    ):
        assert torch.equal(parameter.grad, other.grad), name


def test_planned_operators():
    assert plan_kept_operators("full", EAGER) == ()
    assert plan_kept_operators("keep_matmul", EAGER) == MATMULS
    assert plan_kept_operators("keep_attention", CPU_FLASH) == (ATTENTION,)
    assert set(plan_kept_operators("keep_both", SDPA)) == {*SDPA.operators, *MATMULS}
    for policy in ("keep_attention", "keep_both"):
        with pytest.raises(ConfigError, match="eager is no operator"):
            plan_kept_operators(policy, EAGER)
