import os
import signal

import pytest

from fsdpbench.bench.stop import (
    NUMBERS,
    Interrupted,
    StopFlag,
    end_on_signals,
    interrupt_on_signals,
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_sets_the_flag_and_interrupts_nothing(number):
    before = signal.getsignal(number)
    said = []
    with StopFlag(lambda: said.append("stopping")) as stop:
        assert not stop()
        for _ in range(3):
            os.kill(os.getpid(), number)
        assert stop()
        assert stop()
    assert said == ["stopping"]
    assert signal.getsignal(number) is before


def test_nothing_is_written_from_the_handler():
    said = []
    with StopFlag(lambda: said.append("stopping")):
        os.kill(os.getpid(), signal.SIGINT)
        assert said == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_outside_of_trials_a_signal_is_an_exception(number):
    before = {number: signal.getsignal(number) for number in NUMBERS}
    try:
        interrupt_on_signals()
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), number)
        end_on_signals()
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopFlag() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
