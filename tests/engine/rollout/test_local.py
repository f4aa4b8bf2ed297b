"""A local rollout process from its client's side: generation over updates, both channels, death."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file

from fsdpbench.engine.config.weight_sync import WeightUpdateMeta
from fsdpbench.engine.device import Device
from fsdpbench.engine.rollout.generation import SamplingSettings
from fsdpbench.engine.rollout.local import (
    LocalEngine,
    LocalSettings,
    build_environment,
    build_error,
    launch_local_engines,
)
from fsdpbench.engine.rollout.states import EngineState
from fsdpbench.engine.weight_sync.digests import compute_digests
from fsdpbench.engine.weight_sync.disk import DiskChannel
from fsdpbench.engine.weight_sync.groups import WeightGroup
from fsdpbench.engine.weight_sync.records import Bucket, TensorSpec
from fsdpbench.engine.weight_sync.source import describe_source
from fsdpbench.engine.weight_sync.update import WeightUpdater
from fsdpbench.errors import ConfigError, WeightSyncError, WorkerError
from tests.engine.rollout.reference import greedy, logprobs_of

PATIENCE = 60.0
PROMPTS = [[5, 6, 7], [9]]
GREEDY = SamplingSettings(6, temperature=0.0, stop_token_ids=())


def settings_for(folder):
    return LocalSettings(str(folder), "float32", timeout_seconds=PATIENCE, num_threads=1)


@pytest.fixture(scope="module")
def engines(first_folder):
    started = launch_local_engines([settings_for(first_folder)] * 2)
    yield started
    for engine in started:
        engine.close()


@pytest.fixture
def engine(engines, first_folder):
    """The long-lived engine, with the first weights as version 0."""
    one = engines[0]
    if one.get_version() != 0:
        one.pause_generation()
        load(one, first_folder, 0)
        one.continue_generation()
    return one


def load(engine, folder, version):
    engine.update_weights_from_disk(str(folder), version).result(PATIENCE)
    engine.finish_weight_update(version).result(PATIENCE)


def send(group, engine, bucket, weights):
    """Broadcast what a bucket announces."""
    answer = engine.update_weights_from_distributed(bucket)
    packed = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    for spec, offset in zip(bucket.specs, bucket.offsets, strict=True):
        values = weights[spec.name].contiguous().view(-1).view(torch.uint8)
        packed[offset : offset + spec.num_bytes] = values
    group.broadcast(packed).wait()
    answer.result(PATIENCE)


def open_group(engine):
    group = WeightGroup.listen("weights", 2, Device("cpu"), PATIENCE)
    joining = engine.init_weights_update_group(group.address_for(1))
    group.join()
    joining.result(PATIENCE)
    return group


def bucket_of(weights):
    return Bucket(0, tuple(TensorSpec(n, tuple(t.shape), "float32") for n, t in weights.items()))


def test_generation_and_logprobs(engine, first_model):
    assert engine.state is EngineState.READY
    assert engine.traits.dialect == "local"
    for prompt, sequence in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True):
        assert sequence.prompt == prompt
        assert sequence.tokens == greedy(first_model, prompt, 6)
        assert (sequence.versions, sequence.finish_reason) == ([0] * 6, "length")
        expected = logprobs_of(first_model, prompt + sequence.tokens)
        assert sequence.logprobs == pytest.approx(expected[len(prompt) - 1 :], abs=1e-4)
        assert engine.compute_logprobs([prompt + sequence.tokens]) == [
            pytest.approx(expected, abs=1e-4)
        ]
    with pytest.raises(ConfigError, match=r"prompts\[0\]=9999"):
        engine.generate([[9999]], GREEDY)


def test_many_threads_generate(engine, first_model):
    expected = greedy(first_model, PROMPTS[0], 6)
    with ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(engine.generate, PROMPTS[:1], GREEDY) for _ in range(6)]
        assert all(call.result(PATIENCE)[0].tokens == expected for call in calls)


def test_a_request_goes_on_with_new_weights(
    engine, tmp_path, first_model, second_folder, second_model
):
    def write(folder):
        for file in second_folder.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())

    long = SamplingSettings(300, temperature=0.0, stop_token_ids=())
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(engine.generate, PROMPTS, long)
        while engine._ask("describe")["num_steps"] < 3:
            pass
        engine.pause_generation("abort")
        folder = DiskChannel(tmp_path).publish(1, write)
        load(engine, folder, 1)
        engine.continue_generation()
        sequences = request.result(PATIENCE)
    for prompt, sequence in zip(PROMPTS, sequences, strict=True):
        count = sequence.versions.count(0)
        assert 2 <= count < 300
        assert sequence.versions == [0] * count + [1] * (300 - count)
        short = sequence.tokens[: min(count, 8)]
        assert short == greedy(first_model, prompt, len(short))
        prefix = prompt + sequence.tokens[:count]
        assert sequence.tokens[count : count + 4] == greedy(second_model, prefix, 4)


def test_an_update_through_a_group(engine, second_folder, second_model):
    weights = load_file(second_folder / "model.safetensors")
    engine.pause_generation("wait")
    group = open_group(engine)
    bucket = bucket_of(weights)
    for version in (1, 2):
        send(group, engine, bucket, weights)
        assert engine.get_version() == -1
        digests = engine.finish_weight_update(version, with_digests=True).result(PATIENCE)
        assert digests == compute_digests(weights.items())
    engine.continue_generation()
    assert engine.get_version() == 2
    assert engine.generate(PROMPTS, GREEDY)[0].tokens == greedy(second_model, PROMPTS[0], 6)
    engine.destroy_weights_update_group()
    group.close()


def test_a_trainer_that_stops_half_way(engine, first_folder, second_folder):
    weights = dict(list(load_file(second_folder / "model.safetensors").items())[:3])
    engine.pause_generation()
    group = open_group(engine)
    send(group, engine, bucket_of(weights), weights)
    waiting = engine.update_weights_from_distributed(bucket_of(weights))
    engine.abort_weight_update("rank 3 of the trainer died")
    with pytest.raises(WeightSyncError):
        waiting.result(PATIENCE)
    assert engine.state is EngineState.BROKEN
    with pytest.raises(WeightSyncError, match="holds no whole set of weights"):
        engine.continue_generation()
    group.close()


@pytest.mark.parametrize("phase", ["pausing", "receiving a bucket", "finishing the update"])
def test_a_process_that_stops_ends_the_update_and_takes_the_next(
    engine, second_folder, second_model, phase, monkeypatch
):
    weights = load_file(second_folder / "model.safetensors")
    source = describe_source(weights.items(), "float32", num_layers=2)
    meta = WeightUpdateMeta(wire_dtype="float32", verify=True, timeout_seconds=1.0)
    updater = WeightUpdater([engine], meta, source, Device("cpu"))
    updater.connect()
    call = {
        "pausing": "pause_generation",
        "receiving a bucket": "update_weights_from_distributed",
        "finishing the update": "finish_weight_update",
    }[phase]
    method = getattr(engine, call)

    def stop_and_call(*arguments, **named):
        os.kill(engine.pid, signal.SIGSTOP)
        return method(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(engine, call, stop_and_call)
        try:
            began = time.monotonic()
            with pytest.raises(WeightSyncError, match=r"Not answering: receiver 0") as caught:
                updater.update(8, lambda: iter(weights.items()))
            assert time.monotonic() - began < 20
            assert phase in str(caught.value) or "broadcast" in str(caught.value)
        finally:
            os.kill(engine.pid, signal.SIGCONT)
    updater.close()
    updater = WeightUpdater(
        [engine], meta.with_changes({"timeout_seconds": PATIENCE}), source, Device("cpu")
    )
    updater.update(9, lambda: iter(weights.items()))
    updater.close()
    assert engine.get_version() == 9
    assert engine.generate(PROMPTS, GREEDY)[0].tokens == greedy(second_model, PROMPTS[0], 6)


def test_an_engine_that_is_not_continued_says_so(engine, monkeypatch):
    engine.pause_generation()
    monkeypatch.setattr(engine, "settings", LocalSettings("", timeout_seconds=0.2))
    with pytest.raises(WeightSyncError, match=r"it is paused .*call continue_generation"):
        engine.generate(PROMPTS, GREEDY)
    monkeypatch.undo()
    engine.continue_generation()


def test_death_in_the_middle_of_a_bucket(engines, second_folder):
    doomed = engines[1]
    weights = dict(list(load_file(second_folder / "model.safetensors").items())[:3])
    doomed.pause_generation()
    group = open_group(doomed)
    waiting = doomed.update_weights_from_distributed(bucket_of(weights))
    os.kill(doomed.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"bucket was not answered: .*by signal SIGKILL"):
        waiting.result(PATIENCE)
    doomed.abort_weight_update("never raises")
    doomed.destroy_weights_update_group()
    assert not doomed.is_alive
    with pytest.raises(WorkerError, match="SIGKILL"):
        doomed.get_version()
    assert engines[0].is_alive
    group.abort()


def test_a_path_without_a_model_starts_nothing(tmp_path):
    with pytest.raises(ConfigError, match=r"path=.*config\.json"):
        LocalEngine(settings_for(tmp_path))


def test_all_start_or_none(engines, first_folder, tmp_path):
    num_threads = threading.active_count()
    with pytest.raises(ConfigError, match="path="):
        launch_local_engines([settings_for(first_folder), settings_for(tmp_path)])
    assert threading.active_count() == num_threads


def test_environment_and_errors():
    plain = build_environment(LocalSettings("x"))
    assert "CUDA_VISIBLE_DEVICES" not in plain
    chosen = build_environment(LocalSettings("x", num_threads=2, visible_devices="3"))
    assert (chosen["OMP_NUM_THREADS"], chosen["CUDA_VISIBLE_DEVICES"]) == ("2", "3")
    assert str(build_error("RuntimeError", "CUDA error")).endswith("RuntimeError: CUDA error")
    assert isinstance(build_error("ConfigError", "x"), ConfigError)


@pytest.mark.gpu
def test_a_process_on_a_gpu(first_folder, first_model):
    settings = LocalSettings(str(first_folder), "float32", "cuda", timeout_seconds=PATIENCE)
    with LocalEngine(settings) as engine:
        engine.wait_until_ready()
        found = engine.generate(PROMPTS, GREEDY)
        assert found[0].tokens == greedy(first_model, PROMPTS[0], 6)
        expected = logprobs_of(first_model, PROMPTS[0])
        assert engine.compute_logprobs(PROMPTS[:1]) == [pytest.approx(expected, abs=1e-3)]
