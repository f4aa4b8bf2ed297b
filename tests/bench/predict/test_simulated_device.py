from fsdpbench.bench.predict.simulated_device import (
    DEFAULT_STREAM,
    SimulatedEvent,
    SimulatedStream,
    current_stream,
    use_stream,
)


def test_streams_nest_and_are_told_apart():
    outer, inner = SimulatedStream(), SimulatedStream()
    assert current_stream() is DEFAULT_STREAM
    with use_stream(outer):
        with use_stream(inner):
            assert current_stream() is inner
        with use_stream(None):
            assert current_stream() is outer
    assert current_stream() is DEFAULT_STREAM
    assert len({DEFAULT_STREAM.stream_id, outer.stream_id, inner.stream_id}) == 3


def test_nothing_is_waited_for():
    stream = SimulatedStream()
    event = stream.record_event()
    stream.wait_event(event)
    stream.wait_stream(DEFAULT_STREAM)
    stream.synchronize()
    event.record(stream)
    event.wait(stream)
    event.synchronize()
    assert stream.query()
    assert event.query()
    assert event.elapsed_time(SimulatedEvent(enable_timing=True)) == 0.0
