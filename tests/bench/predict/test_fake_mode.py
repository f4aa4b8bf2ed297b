import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from fsdpbench.bench.predict.fake_mode import DeviceFakeMode, read_figure
from fsdpbench.errors import FsdpbenchError


def test_the_host_computes_with_values():
    with DeviceFakeMode():
        total = torch.arange(4).sum() + torch.tensor(2)
        assert not isinstance(total, FakeTensor)
        assert int(total) == 8


def test_what_comes_from_no_values_has_none():
    with DeviceFakeMode():
        shapes = torch.empty(4, 1 << 40, device="meta")  # would be 16 TiB
        assert not isinstance(shapes, FakeTensor)
        on_host = torch.empty_like(shapes, device="cpu")
        assert isinstance(on_host, FakeTensor)
        assert isinstance(on_host + torch.ones(1), FakeTensor)
        assert on_host.device.type == "cpu"


def test_figures_read_as_numbers_and_decisions_are_refused():
    with DeviceFakeMode():
        values = torch.empty_like(torch.empty(2, device="meta"), device="cpu")
        assert values.tolist() == [1.0, 1.0]
        with pytest.raises(FsdpbenchError, match="int64"):
            read_figure(values.long()[0])
