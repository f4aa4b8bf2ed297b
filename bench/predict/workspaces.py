"""Memory that CUDA kernels take beside their outputs, which shapes alone do not show.

Each entry says where the size comes from. Sizes are those that the kernel asks the caching
allocator for; they live as long as the call, but for cuBLAS's, which stay for the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from fsdpbench.units import MIB

Architecture = Literal["sm80", "sm90"]
"""Generations of GPUs whose kernels are known: A100 and its kind, H100 and H200."""

# torch's test/test_cuda.py, test_cublas_workspace_explicit_allocation: 4096 x 8 KiB on Hopper, else
# 4096 x 2 KiB + 16 x 8 KiB. One a cuBLAS handle and stream, and each thread has a handle.
CUBLAS_BYTES: dict[Architecture, int] = {"sm90": 32 * MIB, "sm80": 8 * MIB + 128 * 1024}
MATMULS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})


def round_up(number: int, multiple: int) -> int:
    """Return the next multiple that is not below the number."""
    return -(-number // multiple) * multiple


def plan_varlen_backward(arguments: Sequence[Any]) -> list[int]:
    """Size the buffers of FlashAttention 2's packed backward.

    flash_attn/flash_api.cpp, mha_varlen_bwd, of flash-attention 2 and in torch's copy of it:
    softmax_d [H, T + 128 B] and dq_accum [T + 128 B, H, D rounded to 32] in fp32; with fewer
    key/value heads dk_expanded and dv_expanded [T_k, H, D] in the inputs' type.
    """
    query, key, bounds = arguments[1], arguments[2], arguments[6]
    tokens, heads, width = query.shape
    rows = tokens + 128 * (bounds.shape[0] - 1)
    sizes = [4 * heads * rows, 4 * rows * heads * round_up(width, 32)]
    if key.shape[1] != heads:
        sizes += [query.element_size() * key.shape[0] * heads * width] * 2
    return sizes


def plan_embedding_backward(arguments: Sequence[Any]) -> list[int]:
    """Size the buffers of the sorted embedding gradient, above 3072 tokens.

    An estimate, not read off the kernel: sorted and original indices, their sort buffers, and
    partial sums in fp32, one row a token at most.
    """
    gradient, indices = arguments[0], arguments[1]
    tokens = indices.numel()
    if tokens <= 3072:
        return []
    return [8 * tokens] * 4 + [4 * tokens * gradient.shape[-1]]


WORKSPACES: dict[str, Callable[[Sequence[Any]], list[int]]] = {
    "torch_attn::_varlen_attn_backward": plan_varlen_backward,
    "aten::embedding_dense_backward": plan_embedding_backward,
}


def plan_workspaces(operator: str, arguments: Sequence[Any]) -> list[int]:
    """Return the bytes that one call of the operator takes beside its outputs."""
    plan = WORKSPACES.get(operator)
    return plan(arguments) if plan else []
