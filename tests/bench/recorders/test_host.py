import os
import time

import pytest

from fsdpbench.bench.recorders.host import CLEAR_FILE, HostRecorder, read_high_water_mark


def test_peak_remembers_memory_that_was_freed():
    recorder = HostRecorder()
    before = recorder.measure_peak()
    block = bytearray(os.urandom(1) * (64 << 20))
    resident = recorder.sample()["rss_bytes"]
    del block
    assert recorder.measure_peak() >= max(before, resident)
    assert recorder.sample()["rss_bytes"] < resident


@pytest.mark.skipif(not CLEAR_FILE.exists(), reason="this system cannot reset the mark")
def test_peak_can_be_counted_anew():
    recorder = HostRecorder()
    block = bytearray(os.urandom(1) * (64 << 20))
    high = recorder.measure_peak()
    del block
    recorder.reset_peak()
    assert recorder.measure_peak() < high - (32 << 20)


def test_unique_memory_is_part_of_resident_memory():
    recorder = HostRecorder()
    assert recorder.sample()["unique_bytes"] is None
    unique = recorder.measure_unique()
    assert recorder.sample()["unique_bytes"] == unique
    assert unique is not None
    assert 0 < unique <= recorder.sample()["rss_bytes"] + (1 << 20)


def test_cpu_percent_follows_the_load():
    recorder = HostRecorder()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    busy = recorder.sample()["cpu_percent"]
    time.sleep(0.3)
    idle = recorder.sample()["cpu_percent"]
    assert busy > 10
    assert idle < busy


def test_high_water_mark_of_a_status_file(tmp_path):
    status = tmp_path / "status"
    status.write_text("Name:\tx\nVmPeak:\t  999 kB\nVmHWM:\t  1234 kB\nVmRSS:\t 5 kB\n")
    assert read_high_water_mark(status) == 1234 * 1024
    status.write_text("Name:\tx\n")
    assert read_high_water_mark(status) is None
    assert read_high_water_mark(tmp_path / "absent") is None
