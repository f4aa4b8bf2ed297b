"""Norm and scale over lists of tensors, and the cutting of long lists into chunks."""

from __future__ import annotations

import math

import pytest
import torch

from fsdpbench.engine.optim import multi_tensor
from fsdpbench.engine.optim.multi_tensor import (
    multi_tensor_l2norm,
    multi_tensor_norm,
    multi_tensor_scale,
    plan_chunks,
)


def test_norm_equals_the_fp64_norm_of_the_concatenation():
    tensors = [
        torch.randn(13, 7),
        torch.randn(7, 13).t(),
        torch.randn(0, 4),
        torch.randn(99, dtype=torch.bfloat16),
        torch.randn(3, dtype=torch.float64),
        torch.ones(1).expand(6),
    ]
    expected = torch.cat([t.double().reshape(-1) for t in tensors]).norm()
    assert multi_tensor_l2norm(tensors).item() == pytest.approx(expected.item(), rel=1e-6)


def test_norm_of_a_long_tensor_keeps_its_digits():
    values = torch.rand(1 << 23, generator=torch.Generator().manual_seed(0))
    expected = torch.linalg.vector_norm(values, dtype=torch.float64).item()
    assert multi_tensor_l2norm([values]).item() == pytest.approx(expected, rel=1e-6)


def test_norm_of_nothing():
    assert multi_tensor_l2norm([]).item() == 0.0
    assert multi_tensor_l2norm([torch.zeros(0)]).item() == 0.0


@pytest.mark.parametrize("scale", [0.5, torch.tensor(0.5)])
def test_scale(scale):
    tensors = [torch.ones(3), torch.ones(2, dtype=torch.bfloat16), torch.ones(0)]
    multi_tensor_scale(tensors, scale)
    assert [t.tolist() for t in tensors] == [[0.5] * 3, [0.5] * 2, []]


@pytest.mark.parametrize("lengths", [[], [0], [5], [3, 0, 4], [10, 1], [1, 1, 1, 1], [23]])
@pytest.mark.parametrize("limit", [1, 4, 5, 100])
def test_chunks_cover_each_element_once(lengths, limit):
    chunks = list(plan_chunks(lengths, limit))
    covered = [
        (piece.index, at)
        for chunk in chunks
        for piece in chunk
        for at in range(piece.start, piece.start + piece.length)
    ]
    assert covered == [(index, at) for index, length in enumerate(lengths) for at in range(length)]
    sizes = [sum(piece.length for piece in chunk) for chunk in chunks]
    assert all(size == limit for size in sizes[:-1])
    assert all(0 < size <= limit for size in sizes)


@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("chunk_bytes", [64, 1 << 20])
def test_norms_in_passing_equal_the_whole(order, chunk_bytes, monkeypatch):
    monkeypatch.setattr(multi_tensor, "PASSING_BYTES", chunk_bytes)
    tensors = [torch.randn(13, 7), torch.randn(7, 5).t(), torch.randn(90)]
    norms = list(multi_tensor._norms_in_passing(tensors, order, torch.float32, torch.device("cpu")))
    assert len(norms) == (1 if chunk_bytes > 64 else 14)  # 216 elements, 16 to a chunk
    found = torch.linalg.vector_norm(torch.cat(norms), ord=order)
    torch.testing.assert_close(found, multi_tensor_norm(tensors, order))
    expected = torch.cat([t.reshape(-1) for t in tensors]).double().norm(order)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.gpu
def test_host_tensors_pass_through_the_device_in_bounded_memory(monkeypatch):
    monkeypatch.setattr(multi_tensor, "PASSING_BYTES", 1 << 20)
    tensors = [torch.randn(1 << 22).pin_memory(), torch.randn(1000)]
    device = torch.device("cuda", 0)
    multi_tensor_norm(tensors, 2.0, device)  # loads kernels
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    norm = multi_tensor_norm(tensors, 2.0, device)
    assert torch.cuda.max_memory_allocated() - before < 2 << 20
    expected = torch.cat(tensors).double().norm().item()
    assert norm.item() == pytest.approx(expected, rel=1e-6)
