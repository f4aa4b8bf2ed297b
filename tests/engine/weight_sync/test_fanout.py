"""Several engines are called at once; errors name the one that failed."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest

from fsdpbench.engine.weight_sync.fanout import THREAD_NAME, Fanout
from fsdpbench.errors import WeightSyncError
from tests.engine.weight_sync.engines import TableEngine, done, failed


def test_engines_are_called_at_the_same_time():
    meeting = threading.Barrier(3)
    fanout = Fanout([TableEngine() for _ in range(3)], 10.0)
    places = fanout.call("meeting", lambda engine: meeting.wait(10))
    assert sorted(places) == [0, 1, 2]


def test_results_come_in_the_order_of_the_engines():
    fanout = Fanout([TableEngine(), TableEngine()], 10.0)
    answers = fanout.begin(lambda index, engine: done(index * 10))
    assert fanout.collect("asking", answers) == [0, 10]


@pytest.mark.parametrize("error", [OSError("no route"), KeyError("x"), WeightSyncError("torn.")])
def test_an_error_names_the_engine_and_the_phase(error):
    fanout = Fanout([TableEngine(), TableEngine()], 10.0)
    answers = fanout.begin(lambda index, engine: failed(error) if index else done())
    with pytest.raises(WeightSyncError, match=r"receiver 1 \(local\): pausing failed: ") as caught:
        fanout.collect("pausing", answers)
    assert caught.value.__cause__ is error
    while not answers[1].done():
        pass
    with pytest.raises(WeightSyncError, match="receiver 1"):
        fanout.raise_failures("pausing", answers)


def test_a_call_that_raises_before_its_future_is_reported_alike():
    fanout = Fanout([TableEngine(update_weights_from_disk=ValueError("bad"))], 10.0)
    answers = fanout.begin(lambda _, engine: engine.update_weights_from_disk("p", 1))
    with pytest.raises(WeightSyncError, match=r"loading failed: bad\. Check that the engine runs"):
        fanout.collect("loading", answers)


def test_silence_ends_at_the_time_out():
    fanout = Fanout([TableEngine(), TableEngine()], 0.2)
    silent: Future[None] = Future()
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"receiver 0 .* no answer within 0\.2 s"):
        fanout.collect("loading", fanout.begin(lambda index, engine: silent))
    assert fanout.ask(lambda engine: silent.result(0.4)) == [None, None]
    assert time.monotonic() - began < 20
    silent.set_result(None)


def test_asking_forgives():
    engines = [TableEngine(), TableEngine(get_version=RuntimeError("dead"))]
    fanout = Fanout(engines, 10.0)
    assert fanout.ask(lambda engine: engine.get_version()) == [1, None]
    fanout.raise_failures("nothing yet", [Future(), Future()])


def test_calls_that_hang_keep_neither_other_calls_nor_the_process():
    fanout = Fanout([TableEngine(), TableEngine()], 10.0)
    end = threading.Event()
    stuck = [fanout.start(lambda engine: end.wait(30)) for _ in range(20)]
    try:
        assert fanout.call("asking", lambda engine: engine.get_version()) == [1, 1]
        threads = [one for one in threading.enumerate() if one.name == THREAD_NAME]
        assert len(threads) >= 40
        assert all(one.daemon for one in threads)
    finally:
        end.set()
    assert all(future.result(10) for pair in stuck for future in pair)
