"""Only layers' inputs are kept, dropout included; the meshes are in test_parallelize."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdpbench.engine.parallel.checkpointing import apply_activation_checkpointing


def build(dropout: float):
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
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()


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
