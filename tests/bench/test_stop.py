import os
import signal

import pytest

from fsdpbench.bench.stop import StopFlag


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_sets_the_flag_and_interrupts_nothing(number):
    before = signal.getsignal(number)
    said = []
    with StopFlag(lambda: said.append("stopping")) as stop:
        assert not stop()
        for _ in range(3):
            os.kill(os.getpid(), number)
        assert stop()
    assert said == ["stopping"]
    assert signal.getsignal(number) is before


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopFlag() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
