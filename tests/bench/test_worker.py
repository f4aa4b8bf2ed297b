import json
import os
import subprocess
import sys

import pytest
import torch

from fsdpbench.bench.faults import IMPOSSIBLE_BYTES
from fsdpbench.bench.folders import TrialFolder
from fsdpbench.bench.records import TrialSpec, WorkloadSpec
from fsdpbench.bench.worker import check_launch, main
from fsdpbench.errors import ConfigError
from fsdpbench.ranks import Ranks
from tests.distributed.pool import run_on_ranks

RUN = "tests.distributed.payloads.trial:run"
COUNT_OBJECTS = "tests.distributed.payloads.trial:count_objects"
CONFIG = {
    "path": "tiny-llama",
    "init_from_scratch": True,
    "dtype": "float32",
    "optimizer": {"lr": 2e-3},
}


@pytest.fixture
def create(tmp_path):
    def create_trial(world_size=1, steps=2, config=None, workload=None, **fields):
        folder = TrialFolder(tmp_path / "trial")
        size = {} if workload and "sequence_lengths" in workload else {"tokens_per_step": 128}
        spec = TrialSpec(
            id="t",
            config={**CONFIG, **(config or {})},
            world_size=world_size,
            workload=WorkloadSpec(
                **{"steps": steps, "warmup_steps": 1, **size, **(workload or {})}
            ),
            **fields,
        )
        folder.create(spec)
        return folder

    return create_trial


def run_alone(folder, device="cpu"):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run(
        [sys.executable, "-m", "fsdpbench.bench.worker", str(folder.path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_two_data_parallel_ranks_leave_a_whole_trial(create):
    folder = create(world_size=2, steps=6, config={"backend": "fsdp:d2"})
    assert run_on_ranks(RUN, 2, timeout_seconds=180, path=str(folder.path))
    outcome = folder.load_outcome()
    steps = read_lines(folder.steps_path)
    assert outcome.status == "ok"
    assert [line["step"] for line in steps] == list(range(7))
    assert [line["warmup"] for line in steps] == [True] + [False] * 6
    assert outcome.step_seconds == [line["seconds"] for line in steps[1:]]
    assert outcome.losses == [line["loss"] for line in steps]
    assert outcome.losses[-1] < outcome.losses[0] - 0.5  # it learns
    assert all(254 <= line["num_tokens"] <= 256 for line in steps)  # of both ranks
    rates = sorted(line["num_tokens"] / line["seconds"] for line in steps[1:])
    assert outcome.tokens_per_second == pytest.approx((rates[2] + rates[3]) / 2)
    assert outcome.peak_device_bytes is None
    assert outcome.peak_host_bytes > 100 << 20
    assert outcome.mfu is None
    assert {"init", "load", "forward", "backward", "clip", "optimizer"} <= set(outcome.phases)
    assert outcome.phases["forward"] < max(outcome.step_seconds)
    assert outcome.attention_kernel
    assert outcome.environment["torch"] == torch.__version__
    assert outcome.environment["nvml"] == "this rank has no NVIDIA GPU"
    beats = folder.read_heartbeats()
    assert [(beat.rank, beat.phase) for beat in beats] == [(0, "done"), (1, "done")]
    samples = read_lines(folder.samples_path)
    assert {line["rank"] for line in samples if line["source"] == "host"} == {0, 1}
    assert all(line["rss_bytes"] > 0 for line in samples if line["source"] == "host")
    trace = json.loads(folder.trace_path.read_text())["traceEvents"]
    assert {event["pid"] for event in trace} == {0, 1}
    assert {"step", "forward"} <= {event["name"] for event in trace}


def test_ranks_of_one_data_parallel_index_train_on_one_batch(create):
    folder = create(
        world_size=2, config={"backend": "fsdp:t2"}, workload={"sequence_lengths": [40, 24]}
    )
    assert run_on_ranks(RUN, 2, timeout_seconds=180, path=str(folder.path))
    assert [line["num_tokens"] for line in read_lines(folder.steps_path)] == [64] * 3


def test_steps_are_spared_collections_of_all_that_was_imported(create):
    folder = create(steps=2, workload={"warmup_steps": 2})
    (seen,) = run_on_ranks(COUNT_OBJECTS, 1, timeout_seconds=180, path=str(folder.path))
    *steps, end = seen
    assert len(steps) == 4
    for is_enabled, num_aside, num_others in steps:
        assert is_enabled
        assert num_aside > 100_000
        assert num_others < num_aside / 5
    assert steps[2][1] > steps[1][1], "the warm-up's own objects are set aside, too"
    assert end[1] == 0, "destroy finds the engine"


def test_the_first_failing_rank_is_named(create):
    folder = create(world_size=2, config={"backend": "fsdp:d2"}, fault="crash@1:rank=1")
    with pytest.raises(AssertionError, match="injected crash on rank 1"):
        run_on_ranks(RUN, 2, timeout_seconds=180, path=str(folder.path))
    outcome = folder.load_outcome()
    assert outcome.status == "crashed"
    assert outcome.error.startswith("rank 1, before_step, step 1: RuntimeError: injected crash")
    assert len(outcome.losses) == 1
    assert len(read_lines(folder.steps_path)) == 1
    words = json.loads((folder.path / "errors" / "rank1.json").read_text())
    assert words["memory"]["rss_bytes"] > 0


@pytest.mark.slow
def test_running_out_of_memory_ends_the_process_and_is_marked(create):
    folder = create(fault="oom@1")
    done = run_alone(folder)
    assert done.returncode == 1
    assert str(IMPOSSIBLE_BYTES) in done.stderr.splitlines()[-1]
    assert "Traceback" in done.stderr
    assert folder.load_outcome().status == "host_oom"
    words = json.loads((folder.path / "errors" / "rank0.json").read_text())
    assert words["exhausted_memory"] == "host"
    assert words["memory"]["peak_host_bytes"] > 0


@pytest.mark.slow
def test_a_bad_data_file_is_named_with_its_line(create, tmp_path):
    data = tmp_path / "bad.jsonl"
    data.write_text('{"text": "good"}\n{"txt": 1}\n')
    folder = create(workload={"data": str(data)})
    with pytest.raises(AssertionError, match=r"bad\.jsonl:2"):
        run_on_ranks(RUN, 1, timeout_seconds=180, path=str(folder.path))
    assert "bad.jsonl:2" in folder.load_outcome().error


@pytest.mark.slow
def test_a_killed_rank_leaves_no_words_but_the_steps(create):
    folder = create(world_size=2, config={"backend": "fsdp:d2"}, fault="kill@2:rank=1")
    with pytest.raises(AssertionError, match="died"):
        run_on_ranks(RUN, 2, timeout_seconds=180, path=str(folder.path))
    assert folder.load_outcome() is None  # rank 0 only knows that its peer is gone
    assert len(read_lines(folder.steps_path)) == 2
    beats = {beat.rank: (beat.phase, beat.step) for beat in folder.read_heartbeats()}
    assert beats == {0: ("step", 2), 1: ("before_step", 2)}


def test_usage_is_said_in_one_line(capsys):
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("usage: ")


def test_a_launch_that_does_not_fit_is_refused():
    spec = TrialSpec(id="t", config={}, world_size=4, device="cuda")
    with pytest.raises(ConfigError) as caught:
        check_launch(spec, Ranks(0, 0, 64, 64))
    text = str(caught.value)
    assert "world_size=4: was launched on 64 process(es)" in text
    assert "device=cuda" in text


@pytest.mark.gpu
def test_a_gpu_trial_has_the_drivers_and_the_allocators_figures(create):
    folder = create(device="cuda", steps=20, config={"dtype": "bfloat16"})
    done = run_alone(folder, "cuda")
    outcome = folder.load_outcome()
    assert done.returncode == 0, done.stderr
    assert outcome.environment["nvml"] == "ok" or "process_bytes" in outcome.environment["nvml"]
    assert 0 < outcome.peak_device_bytes <= outcome.peak_reserved_bytes
    assert outcome.peak_reserved_bytes < outcome.device_total_bytes
    assert outcome.environment["gpu"]
    assert outcome.losses[-1] < outcome.losses[0]
    samples = read_lines(folder.samples_path)
    nvml = [line for line in samples if line["source"] == "nvml"]
    assert all(line["used_bytes"] > 0 and line["power_watts"] > 0 for line in nvml)
    assert [line for line in samples if line["source"] == "allocator"]


@pytest.mark.gpu
def test_running_out_of_device_memory_is_marked(create):
    folder = create(device="cuda", fault="oom@1")
    assert run_alone(folder, "cuda").returncode == 1
    outcome = folder.load_outcome()
    assert outcome.status == "oom"
    assert "CUDA out of memory" in outcome.error
    assert outcome.peak_device_bytes > 0
    words = json.loads((folder.path / "errors" / "rank0.json").read_text())
    assert words["exhausted_memory"] == "device"
    assert words["memory"]["device"]["peak_allocated_bytes"] > 0
