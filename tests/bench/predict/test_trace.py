from fsdpbench.bench.predict.events import MemoryEvent
from fsdpbench.bench.predict.trace import (
    Category,
    PhaseMark,
    PhasePeak,
    Trace,
    measure_phases,
    round_block,
)

CATEGORIES = {0: Category.PARAMETERS, 1: Category.ACTIVATIONS, 2: Category.TEMPORARIES}
EVENTS = [
    MemoryEvent("alloc", 0, 1000, 0),
    MemoryEvent("alloc", 1, 512, 0),
    MemoryEvent("alloc", 2, 1, 0),
    MemoryEvent("free", 2, 1, 0),
    MemoryEvent("free", 1, 512, 0),
]


def test_blocks_are_rounded():
    assert [round_block(size) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]


def test_each_phase_has_the_peak_within_it():
    marks = [PhaseMark(0, "load", 0), PhaseMark(1, "forward", 1), PhaseMark(1, "clip", 5)]
    load, forward, clip = measure_phases(EVENTS, CATEGORIES, marks)
    assert load == PhasePeak(0, "load", 1024, 1024, {Category.PARAMETERS: 1024})
    assert forward.peak_bytes == 2048
    assert forward.end_bytes == 1024
    assert sum(forward.split.values()) == forward.peak_bytes
    assert clip.peak_bytes == clip.end_bytes == 1024


def test_a_phase_that_comes_again_keeps_the_higher_peak():
    marks = [PhaseMark(1, "forward", 0), PhaseMark(1, "backward", 3), PhaseMark(1, "forward", 4)]
    forward, backward = measure_phases(EVENTS, CATEGORIES, marks)
    assert (forward.phase, forward.peak_bytes, forward.end_bytes) == ("forward", 2048, 1024)
    assert backward.peak_bytes == 2048
    trace = Trace(0, 1, "eager", EVENTS, CATEGORIES, [backward, forward])
    assert trace.peak_phase is backward
