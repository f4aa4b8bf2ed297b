"""What is described is what the walk yields."""

from __future__ import annotations

import torch

from fsdpbench.engine.device import Device
from fsdpbench.engine.weight_sync.records import TensorSpec
from fsdpbench.engine.weight_sync.source import describe_source, iterate_whole_tensors

NAMED = {"a": torch.randn(3, 4, requires_grad=True), "b": torch.randn(5)}


def test_specs_have_the_dtype_of_the_wire():
    source = describe_source(NAMED.items(), "bfloat16", num_layers=2, family="qwen3")
    assert source.specs == (TensorSpec("a", (3, 4), "bfloat16"), TensorSpec("b", (5,), "bfloat16"))
    assert (source.num_layers, source.is_tied, source.family) == (2, False, "qwen3")


def test_the_walk_yields_whole_tensors_outside_autograd():
    walked = dict(iterate_whole_tensors(NAMED.items(), Device("cpu"), torch.bfloat16))
    assert list(walked) == ["a", "b"]
    assert torch.equal(walked["a"], NAMED["a"].bfloat16())
    assert not walked["a"].requires_grad
    kept = dict(iterate_whole_tensors(NAMED.items(), Device("cpu")))
    assert kept["b"].dtype == torch.float32
