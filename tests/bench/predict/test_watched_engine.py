from tests.distributed.pool import run_on_ranks

MEASURE = "tests.distributed.payloads.predict_memory:measure"


def test_a_real_run_is_told_by_phases():
    config = {"path": "tiny-llama", "init_from_scratch": True, "dtype": "float32", "optimizer": {}}
    workload = {"sequence_lengths": [64, 64], "steps": 1, "warmup_steps": 0}
    phases = run_on_ranks(MEASURE, 1, config=config, workload=workload)[0]
    step = ["forward", "backward", "clip", "optimizer"]
    assert [phase for _, phase, _ in phases] == ["build", "load", *step]
    peaks = {phase: peak for _, phase, peak in phases}
    # the first optimizer step makes two moments of each parameter
    assert peaks["optimizer"] > 1.9 * peaks["clip"]
