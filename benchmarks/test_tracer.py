"""What a span costs, off and on. Numbers for the lab book; no test depends on them."""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from fsdpbench.engine.device import Device
from fsdpbench.engine.tracing.tracer import Tracer

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.mark.parametrize("enabled", [False, True], ids=["off", "on"])
@pytest.mark.parametrize("kind", DEVICES)
def test_span(benchmark: BenchmarkFixture, kind: str, enabled: bool) -> None:
    """Time a hundred empty spans."""
    tracer = Tracer(0, Device(kind), enabled)

    def hundred_spans() -> None:
        for _ in range(100):
            with tracer.span("forward", "compute"):
                pass

    benchmark.pedantic(hundred_spans, setup=tracer.clear, rounds=200, warmup_rounds=5)
