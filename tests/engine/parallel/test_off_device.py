"""Every byte arrives once, threads fall behind by a fixed number of pieces, errors come out."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from fsdpbench.engine.parallel import off_device
from fsdpbench.engine.parallel.off_device import OffDevice


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(off_device, "PIECE_BYTES", 64)
    monkeypatch.setattr(off_device, "MAX_PIECES", 3)


def fill(target, start, piece):
    target[start : start + piece.numel()] = piece


def copy_all(tensors):
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
    with OffDevice() as pieces:
        for tensor, copy in zip(tensors, copies, strict=True):
            target = copy.view(-1).view(torch.uint8)
            pieces.submit(tensor, lambda start, target=target: partial(fill, target, start))
            if tensor.device.type != "cpu":
                tensor.zero_()  # later on the same stream, so it must not show
        pieces.finish()
    return copies


SHAPES = [(), (0,), (3,), (16,), (7, 9), (40, 5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_bytes_arrive(dtype):
    tensors = [(torch.randn(shape) * 9).to(dtype) for shape in SHAPES]
    for tensor, copy in zip(tensors, copy_all(tensors), strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_bytes_arrive_from_a_device(dtype):
    tensors = [(torch.randn(shape, device="cuda") * 9).to(dtype) for shape in SHAPES * 20]
    expected = [tensor.cpu() for tensor in tensors]
    for tensor, copy in zip(expected, copy_all(tensors), strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.gpu
def test_what_waits_holds_no_device_memory():
    go = threading.Event()
    before = torch.cuda.memory_allocated()
    with OffDevice() as pieces:
        pieces.submit(torch.zeros(16, device="cuda"), lambda start: lambda piece: go.wait(10))
        assert torch.cuda.memory_allocated() <= before
        go.set()
        pieces.finish()


def test_a_thread_is_on_the_device_before_it_waits():
    said = []
    stage = SimpleNamespace(
        device=SimpleNamespace(make_current=lambda: said.append("current")),
        wait_until_free=lambda: said.append("wait"),
        memory=torch.zeros(8, dtype=torch.uint8),
    )
    off_device._hand_over(stage, 4, lambda piece: said.append(piece.numel()))
    assert said == ["current", "wait", 4]


def test_no_more_than_the_allowed_pieces_wait():
    go, third, begun = threading.Event(), threading.Event(), []

    def take(start, piece):
        begun.append(start)
        if len(begun) == 3:
            third.set()
        go.wait(10)

    with OffDevice() as pieces:
        thread = threading.Thread(
            target=pieces.submit,
            args=(torch.zeros(1000), lambda start: partial(take, start)),
        )
        thread.start()
        assert third.wait(10)
        thread.join(0.05)
        assert thread.is_alive()
        assert sorted(begun) == [0, 64, 128]
        go.set()
        thread.join(10)
        pieces.finish()
    assert len(begun) == 63


@pytest.mark.parametrize("at", ["submit", "finish"])
def test_errors_come_out(at):
    def fail(piece):
        raise OSError("full")

    with OffDevice() as pieces, pytest.raises(OSError, match="full"):
        pieces.submit(torch.zeros(16 if at == "finish" else 1000), lambda start: fail)
        assert at == "finish"
        pieces.finish()


def test_leaving_drops_what_waits():
    go, begun = threading.Event(), []

    def take(piece):
        begun.append(piece)
        go.wait(10)

    with pytest.raises(ValueError, match="of the block"), OffDevice() as pieces:
        pieces.submit(torch.zeros(16), lambda start: take)
        go.set()
        raise ValueError("of the block")
    assert len(begun) <= 1
    pieces.close()
