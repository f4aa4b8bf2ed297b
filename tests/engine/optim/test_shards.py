"""Local views; the placements themselves are checked on ranks by the tests of clip and sharded."""

from __future__ import annotations

import pytest
import torch

from fsdpbench.engine.optim.shards import (
    by_device,
    flat_view,
    local_gradient,
    local_tensor,
    reduce_pending_gradients,
    sharding_groups,
)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(2, 3, 4),
        torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        torch.arange(6.0).view(6, 1).t(),
        torch.arange(6.0).view(1, 6).t(),
        torch.tensor(5.0),
        torch.zeros(0, 3),
        torch.zeros(3, 0).t(),
    ],
    ids=lambda t: f"{tuple(t.shape)}-{t.stride()}",
)
def test_flat_view_shares_memory_in_memory_order(tensor):
    flat = flat_view(tensor)
    assert flat.shape == (tensor.numel(),)
    assert flat.data_ptr() == tensor.data_ptr()
    storage = torch.arange(float(tensor.numel()))
    if tensor.numel() > 1:
        assert torch.equal(flat, storage)


def test_a_gradient_gets_its_parameters_strides():
    param = torch.nn.Parameter(torch.zeros(3, 4))
    grad = torch.randn(4, 3).t()
    param.grad = grad
    local = local_gradient(param)
    assert local.stride() == param.stride()
    assert torch.equal(local, grad)
    param.grad = torch.randn(3, 4)
    assert local_gradient(param).data_ptr() == param.grad.data_ptr()


def test_plain_tensors_pass_through():
    param = torch.nn.Parameter(torch.zeros(3))
    param.grad = grad = torch.ones(3)
    assert local_tensor(param) is param
    assert sharding_groups(param) == []
    reduce_pending_gradients([param])
    assert param.grad is grad
    without = torch.nn.Parameter(torch.zeros(3))
    assert by_device([param, without]) == {torch.device("cpu"): [param]}
