"""Spans: nesting, threads, errors, limits; device times against a device with a known clock."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import pytest
import torch

from fsdpbench.engine.config.tracing import PerfTracerConfig
from fsdpbench.engine.device import Device
from fsdpbench.engine.tracing.events import load_events
from fsdpbench.engine.tracing.tracer import Tracer, build_tracer
from fsdpbench.errors import ConfigError

CPU = Device("cpu")


def test_spans_nest_and_take_the_hosts_time():
    tracer = Tracer(0, CPU)
    earliest = time.time_ns()
    with tracer.span("step"):
        with tracer.span("forward", "compute"):
            time.sleep(0.01)
        with tracer.span("reduce", "comm"):
            pass
    forward, reduce, step = tracer.events()
    assert [forward.name, reduce.name, step.name] == ["forward", "reduce", "step"]
    assert [forward.depth, reduce.depth, step.depth] == [1, 1, 0]
    assert reduce.category == "comm"
    assert forward.host_seconds >= 0.01
    assert step.host_seconds >= forward.host_seconds + reduce.host_seconds
    assert earliest - 10**7 < step.start_ns <= forward.start_ns < reduce.start_ns
    assert step.start_ns <= time.time_ns() + 10**7
    assert step.device_seconds is None


def test_phase_seconds_gathers_by_name():
    tracer = Tracer(0, CPU)
    for _ in range(3):
        with tracer.span("forward"):
            pass
    with tracer.span("backward"):
        pass
    phases = tracer.phase_seconds()
    assert {name: len(seconds) for name, seconds in phases.items()} == {"forward": 3, "backward": 1}
    assert tracer.phase_seconds() == phases
    tracer.clear()
    assert tracer.phase_seconds() == {}


def test_an_error_passes_and_is_noted():
    tracer = Tracer(0, CPU)
    with pytest.raises(KeyError), tracer.span("outer"), tracer.span("inner"):
        raise KeyError("x")
    with tracer.span("next"):
        pass
    assert [(e.name, e.error, e.depth) for e in tracer.events()] == [
        ("inner", "KeyError", 1),
        ("outer", "KeyError", 0),
        ("next", None, 0),
    ]


def test_threads_nest_apart():
    tracer = Tracer(0, CPU)

    def work():
        with tracer.span("loader", "io"):
            pass

    with tracer.span("main"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    loader, main = tracer.events()
    assert (loader.depth, main.depth) == (0, 0)
    assert loader.thread != main.thread


def test_an_off_tracer_shares_one_context_and_keeps_nothing():
    tracer = build_tracer(PerfTracerConfig(), 0, CPU)
    assert tracer.span("a") is tracer.span("b", "comm")
    with tracer.span("a"), tracer.span("b"):
        pass
    assert tracer.events() == []
    tracer.enabled = True
    with tracer.span("c"):
        pass
    assert [event.name for event in tracer.events()] == ["c"]


def test_spans_beyond_the_limit_are_counted(tmp_path):
    tracer = build_tracer(PerfTracerConfig(enabled=True, max_events=2), 0, CPU)
    for index in range(5):
        with tracer.span(str(index)):
            pass
    assert [event.name for event in tracer.events()] == ["0", "1"]
    header, _ = load_events(tracer.save(tmp_path / "rank0.jsonl"))
    assert header.num_dropped == 3
    tracer.clear()
    with tracer.span("again"):
        pass
    assert len(tracer.events()) == 1


def test_unknown_category_is_refused():
    with pytest.raises(ConfigError, match=r"category='gpu': must be one of compute, comm"):
        Tracer(0, CPU).span("a", "gpu")


def test_a_saved_file_holds_the_rank_and_its_spans(tmp_path):
    tracer = Tracer(5, CPU)
    with tracer.span("a"):
        pass
    header, events = load_events(tracer.save(tmp_path / "rank5.jsonl"))
    assert (header.rank, header.device) == (5, "cpu")
    assert events == tracer.events()


@dataclass
class ClockStream:
    stream_id: int = 4


@dataclass
class ClockEvent:
    clock: ClockDevice
    at_ms: float = float("nan")

    def record(self, stream):
        assert isinstance(stream, ClockStream)
        self.at_ms = self.clock.now_ms

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return end.at_ms - self.at_ms


@dataclass
class ClockDevice:
    """An asynchronous device whose time is a number that the test moves."""

    type: str = "clock"
    index: int = 0
    is_asynchronous: bool = True
    now_ms: float = 5000.0
    num_synchronizations: int = 0
    made: list[ClockEvent] = field(default_factory=list)

    def current_stream(self):
        return ClockStream()

    def event(self, timing):
        assert timing
        self.made.append(ClockEvent(self))
        return self.made[-1]

    def synchronize(self):
        self.num_synchronizations += 1


def test_device_times_lie_on_the_hosts_axis_without_waiting():
    device = ClockDevice()
    tracer = Tracer(0, device)
    waits = device.num_synchronizations
    device.now_ms += 100
    with tracer.span("outer"):
        device.now_ms += 1
        with tracer.span("inner"):
            device.now_ms += 20
        device.now_ms += 300
    assert device.num_synchronizations == waits
    inner, outer = tracer.events()
    assert device.num_synchronizations == waits + 1
    assert inner.device_seconds == pytest.approx(0.020)
    assert outer.device_seconds == pytest.approx(0.321)
    assert inner.device_start_ns - outer.device_start_ns == pytest.approx(1e6, abs=1e3)
    assert (inner.stream, outer.stream) == (4, 4)
    device.now_ms += 1000
    with tracer.span("later"):
        device.now_ms += 7
    later = tracer.events()[-1]
    assert later.device_start_ns - outer.device_start_ns == pytest.approx(1321e6, abs=1e3)
    assert tracer.phase_seconds()["later"] == [pytest.approx(0.007)]


def test_device_events_are_used_again():
    device = ClockDevice()
    tracer = Tracer(0, device, max_events=10)
    for _ in range(5):
        for _ in range(4):
            with tracer.span("a"):
                device.now_ms += 1
        assert [e.device_seconds for e in tracer.events()] == [pytest.approx(1e-3)] * 4
        tracer.clear()
    assert len(device.made) <= 9


def test_spans_are_context_managers():
    assert isinstance(Tracer(0, CPU).span("a"), AbstractContextManager)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.gpu
def test_gpu_spans_measure_the_device_and_do_not_wait():
    device = Device("cuda", 0)
    device.make_current()
    tracer = Tracer(0, device)
    matrix = torch.randn(4096, 4096, device="cuda")
    matrix @ matrix
    device.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with tracer.span("outer"), tracer.span("inner"):
            for _ in range(50):
                matrix @ matrix
    finally:
        torch.cuda.set_sync_debug_mode("default")
    inner, outer = tracer.events()
    assert inner.host_seconds < inner.device_seconds <= outer.device_seconds
    assert outer.device_start_ns <= inner.device_start_ns
    assert abs(outer.device_start_ns - outer.start_ns) < 10**8
