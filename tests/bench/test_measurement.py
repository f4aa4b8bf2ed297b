import pytest

from fsdpbench.bench.measurement import Measurement, Peaks, build_outcome, merge_peaks
from fsdpbench.bench.timing import StepRecord


def steps(*seconds, warmup=1):
    return [
        StepRecord(number, value, 5.0 - number, 1.0, 1000, number < warmup)
        for number, value in enumerate(seconds)
    ]


def test_peaks_are_the_highest_of_any_rank():
    peaks = [Peaks(1, 20, None, 300), Peaks(2, 10, None, 100), Peaks(None, None, None, 200)]
    assert merge_peaks(peaks) == Peaks(2, 20, None, 300)
    assert merge_peaks([]) == Peaks()


def test_outcome_of_a_measured_trial():
    outcome = build_outcome(
        Measurement(
            steps=steps(9.0, 1.0, 2.0, 4.0),
            step_flops=[4e15] * 4,
            peaks=[Peaks(1, 2, 3, 4)],
            phases={"forward": 0.5},
            environment={"torch": "2"},
            attention_kernel="varlen",
            gpu_name="NVIDIA H200",
            dtype="bfloat16",
            world_size=4,
        )
    )
    assert outcome.status == "ok"
    assert outcome.step_seconds == [1.0, 2.0, 4.0]
    assert outcome.warmup_steps == 1
    assert outcome.losses == [5.0, 4.0, 3.0, 2.0]
    assert outcome.grad_norms == [1.0] * 4
    assert outcome.tokens_per_step == 1000
    assert outcome.tokens_per_second == 500
    assert outcome.flops_per_step == 4e15
    assert outcome.mfu == pytest.approx(2e15 / (4 * 989e12))
    assert "4 x 989e12" in outcome.mfu_formula
    assert outcome.peak_device_bytes == 1
    assert outcome.peak_reserved_bytes == 2
    assert outcome.device_total_bytes == 3
    assert outcome.peak_host_bytes == 4
    assert outcome.phases == {"forward": 0.5}
    assert outcome.attention_kernel == "varlen"


def test_no_mfu_without_a_gpu():
    outcome = build_outcome(Measurement(steps=steps(1.0, 1.0), step_flops=[1e9] * 2))
    assert outcome.mfu is None
    assert outcome.mfu_formula == "null: no GPU"
    assert outcome.tokens_per_second == 1000


@pytest.mark.parametrize("seconds", [(), (3.0,)], ids=["before any step", "in warm-up"])
def test_outcome_of_a_failure_keeps_what_is_known(seconds):
    measurement = Measurement(
        steps=steps(*seconds), step_flops=[1.0] * len(seconds), gpu_name="NVIDIA H200"
    )
    outcome = build_outcome(measurement, status="oom", error="rank 0: no memory")
    assert (outcome.status, outcome.error) == ("oom", "rank 0: no memory")
    assert outcome.step_seconds == []
    assert outcome.losses == [5.0] * len(seconds)
    assert outcome.tokens_per_second is outcome.mfu is outcome.flops_per_step is None
