"""Gradients that meet at a tensor: autograd adds them in place where it holds the only reference.

torch/csrc/autograd/input_buffer.cpp (`accumulate`) gives that up as soon as a dispatch mode
watches, so a watched run would need a buffer more than a real one (622 MB for a tied embedding of
qwen3-1.7b). The decision is made here again, by the same rule. Note: the counts below are those of
a tensor that only autograd's buffer and this very call hold; they are torch's own business and
guarded by a test.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward

LONE_TENSOR = 4  # references to a tensor on its way through a mode: the buffer's and the call's
LONE_STORAGE = 2  # those to its storage
DISPATCH_FILES = ("torch/_compile.py", "torch/_dynamo/eval_frame.py")  # frames around every mode


def plan_accumulation(func: Any, args: Sequence[Any]) -> tuple[Any, Any] | None:
    """Return the tensor to add to and the one to add, if autograd would accumulate in place.

    To be called directly by a mode's `__torch_dispatch__`, whose arguments these are.
    """
    if func is not torch.ops.aten.add.Tensor or torch.is_grad_enabled():
        return None
    left, right = args
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return None
    if left.shape != right.shape or left.dtype != right.dtype or not is_called_by_autograd():
        return None
    if is_lone(left):
        return left, right
    return (right, left) if is_lone(right) else None


def is_lone(tensor: torch.Tensor) -> bool:
    """Tell whether nobody else sees the tensor's memory, which is dense."""
    references = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return (
        tensor._use_count() == LONE_TENSOR  # type: ignore[attr-defined]
        and references == LONE_STORAGE
        and is_dense(tensor)
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether the elements fill their memory, each place once, in any order of dims."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def is_called_by_autograd() -> bool:
    """Tell whether the engine itself called the operator, no Python code of a backward."""
    frame = sys._getframe(3) if sys._getframe(2).f_back else None
    while frame is not None and frame.f_code.co_filename.endswith(DISPATCH_FILES):
        frame = frame.f_back
    # the engine has threads of its own for devices, without a Python frame below
    return frame is None or frame.f_code is _engine_run_backward.__code__
