from types import SimpleNamespace

import pynvml
import pytest

from fsdpbench.bench.recorders.nvml import NvmlRecorder

GIB = 1 << 30


class FakeLibrary:
    """Answers as the driver would; functions named in `refused` raise."""

    NVMLError = pynvml.NVMLError
    nvmlMemory_v2 = pynvml.nvmlMemory_v2
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, refused=(), used=(10 * GIB,), processes=((7, 4 * GIB),)):
        self.refused = refused
        self.used = list(used)
        self.processes = processes

    def answer(self, function, value):
        if function in self.refused:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return value

    def nvmlInit(self):
        self.answer("init", None)

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return self.answer("handle", f"handle of {uuid}")

    def nvmlDeviceGetMemoryInfo(self, handle, version):
        assert version == pynvml.nvmlMemory_v2
        used = self.used.pop(0) if len(self.used) > 1 else self.used[0]
        return self.answer("memory", SimpleNamespace(used=used))

    def nvmlDeviceGetUtilizationRates(self, handle):
        return self.answer("utilisation", SimpleNamespace(gpu=93, memory=41))

    def nvmlDeviceGetPowerUsage(self, handle):
        return self.answer("power", 512_300)

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return self.answer("clocks", {1: 1980, 2: 3201}[kind])

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return self.answer("temperature", 61)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self.answer("throttle", 0x4 | 0x40)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        entries = [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes]
        return self.answer("processes", entries)

    def nvmlSystemGetDriverVersion(self):
        return self.answer("driver", b"580.1")


def test_reads_every_field():
    recorder = NvmlRecorder("GPU-1", FakeLibrary(), process_id=7)
    assert recorder.unavailable is None
    assert recorder.sample() == {
        "used_bytes": 10 * GIB,
        "process_bytes": 4 * GIB,
        "num_processes": 1,
        "utilisation_percent": 93,
        "memory_utilisation_percent": 41,
        "power_watts": 512.3,
        "sm_clock_megahertz": 1980,
        "memory_clock_megahertz": 3201,
        "temperature_celsius": 61,
        "throttle_reasons": ["power_cap", "hardware_thermal"],
    }
    assert recorder.missing == {}
    assert recorder.read_driver_version() == "580.1"


def test_peak_is_the_highest_sample():
    recorder = NvmlRecorder("GPU-1", FakeLibrary(used=(1 * GIB, 9 * GIB, 2 * GIB)))
    assert recorder.measure_peak() is None
    for _ in range(3):
        recorder.sample()
    assert recorder.measure_peak() == 9 * GIB


@pytest.mark.parametrize(
    ("function", "fields"),
    [
        ("memory", {"used_bytes"}),
        ("utilisation", {"utilisation_percent", "memory_utilisation_percent"}),
        ("power", {"power_watts"}),
        ("clocks", {"sm_clock_megahertz", "memory_clock_megahertz"}),
        ("temperature", {"temperature_celsius"}),
        ("throttle", {"throttle_reasons"}),
        ("processes", {"process_bytes", "num_processes"}),
    ],
)
def test_a_refused_function_costs_its_fields_only(function, fields):
    recorder = NvmlRecorder("GPU-1", FakeLibrary(refused=(function,)), process_id=7)
    sample = recorder.sample()
    assert {name for name, value in sample.items() if value is None} == fields
    assert all("Not Supported" in reason for reason in recorder.missing.values())
    assert len(recorder.missing) == 1


@pytest.mark.parametrize("processes", [(), ((8, GIB),), ((7, None),)], ids=str)
def test_own_memory_is_none_unless_the_driver_knows_the_process(processes):
    recorder = NvmlRecorder("GPU-1", FakeLibrary(processes=processes), process_id=7)
    sample = recorder.sample()
    assert sample["process_bytes"] is None
    assert sample["num_processes"] == len(processes)


@pytest.mark.parametrize("function", ["init", "handle"])
def test_without_a_driver_it_says_why(function):
    recorder = NvmlRecorder("GPU-1", FakeLibrary(refused=(function,)))
    assert "Not Supported" in recorder.unavailable
    assert recorder.measure_peak() is None
    assert recorder.read_driver_version() is None


def test_without_a_gpu_it_says_so():
    assert NvmlRecorder(None, FakeLibrary()).unavailable == "this rank has no NVIDIA GPU"


def test_fake_and_real_library_have_the_same_names():
    for name in dir(FakeLibrary):
        if name.startswith(("nvml", "NVML")):
            assert hasattr(pynvml, name), name


def test_clock_reasons_are_the_bits_of_the_real_library():
    assert pynvml.nvmlClocksThrottleReasonSwPowerCap == 0x4
    assert pynvml.nvmlClocksThrottleReasonHwThermalSlowdown == 0x40
    assert pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown == 0x80
