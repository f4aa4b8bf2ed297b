import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpbench.bench.predict.accumulation import is_dense, plan_accumulation


class Counter(TorchDispatchMode):
    """Counts additions of the backward pass, and those that were planned to be in place."""

    def __init__(self):
        super().__init__()
        self.additions, self.in_place = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled():
            self.additions += 1
            self.in_place += plan_accumulation(func, args) is not None
        return func(*args, **(kwargs or {}))


class AddInPython(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1 + gradient * 1


def meet_alone(weight):
    return (weight * 2).sum() + weight.sin().sum()


def meet_shared(weight):
    left, right = weight * 2, weight * 3
    total = left + right  # hands one gradient to both
    return (total * 5).sum() + left.sin().sum() + right.sin().sum()


def meet_views(weight):
    left, right = weight * 2, weight * 3
    total = left.view(-1) + right.view(-1)
    return (total * 5).sum() + left.sin().sum() + right.sin().sum()


@pytest.mark.parametrize(
    ("function", "additions", "in_place"),
    [
        (meet_alone, 1, 1),
        (meet_shared, 3, 3),  # each time the other one is alone
        (meet_views, 3, 3),
        (lambda weight: AddInPython.apply(weight).sum(), 1, 0),
        (lambda weight: (weight * 2).sum() + weight.expand(2, 8, 8).sum(), 1, 1),
    ],
    ids=["alone", "shared", "views", "python", "expanded"],
)
def test_gradients_meet_in_place_where_nobody_else_sees_them(function, additions, in_place):
    weight = torch.ones(8, 8, requires_grad=True)
    with Counter() as counter:
        function(weight).backward()
    assert (counter.additions, counter.in_place) == (additions, in_place)


def meet_twice_shared(weight):
    left, right, third = weight * 2, weight * 3, weight * 4
    first, second = left + right, left + third  # both hand `left` a gradient that another one has
    return (first * 5).sum() + (second * 6).sum()


def test_gradients_that_others_see_need_a_buffer():
    weight = torch.ones(8, 8, requires_grad=True)
    with Counter() as counter:
        meet_twice_shared(weight).backward()
    assert counter.in_place < counter.additions
    assert weight.grad.tolist() == [[2 * 11 + 3 * 5 + 4 * 6.0] * 8] * 8


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.ones(2, 3, 4), True),
        (torch.ones(2, 3, 4).transpose(0, 2), True),
        (torch.ones(3).expand(2, 3), False),
        (torch.ones(4, 4)[:, :2], False),
        (torch.ones(1, 3)[:, None], True),
    ],
)
def test_dense_is_any_order_without_gaps(tensor, dense):
    assert is_dense(tensor) is dense
