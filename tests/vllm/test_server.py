"""A real vLLM server takes weights from disk: what it answers is what transformers computes."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from safetensors.torch import load_file, save_file

from fsdpbench.engine.rollout.client import VllmDialect
from fsdpbench.engine.rollout.generation import SamplingSettings
from fsdpbench.engine.rollout.states import EngineState
from fsdpbench.engine.weight_sync.records import Bucket, GroupAddress, TensorSpec
from fsdpbench.errors import ConfigError, WeightSyncError, WorkerError
from tests.vllm.conftest import PYTHON

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]

PROMPTS = [[5, 6, 7, 8], [300, 20], [9]]
GREEDY = SamplingSettings(max_new_tokens=8, temperature=0.0, stop_token_ids=())
MANY = [[first, 6, 7, 8] for first in range(10, 26)]  # together long enough to be paused
LONG = SamplingSettings(max_new_tokens=480, temperature=0.0, stop_token_ids=())
UNIQUE_ID = base64.b64encode(bytes(128)).decode()
LOGPROB_NOISE = 2e-3  # fp32 on both sides, other kernels


def load(engine, policy, version, in_flight="abort"):
    engine.pause_generation(in_flight)
    engine.update_weights_from_disk(str(policy.folder), version).result(60)
    engine.finish_weight_update(version).result(60)
    engine.continue_generation()


def check_serves(engine, policy, version):
    for prompt, sequence in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True):
        policy.check_greedy(prompt, sequence.tokens)
        assert sequence.versions == [version] * 8
        assert sequence.finish_reason == "length"
        wanted = policy.score([*prompt, *sequence.tokens])
        assert sequence.logprobs == pytest.approx(wanted[-8:], abs=LOGPROB_NOISE)
    texts = [[5, 6, 7, 8, 9, 10], [11, 12], [13]]
    for tokens, logprobs in zip(texts, engine.compute_logprobs(texts), strict=True):
        assert logprobs == pytest.approx(policy.score(tokens), abs=LOGPROB_NOISE)
    assert engine.get_version() == version


def wait_until_running(engine, running):
    """Return when requests have reached the server; a slow test may find them answered."""
    while not engine.num_requests and not running.done():
        pass
    engine.get_version()  # the server takes calls in turn


def test_reload_brings_the_new_weights(connect, policies):
    old, new = policies
    engine = connect()
    assert engine.traits.dialect == "vllm"
    assert engine.traits.world_size == 1
    assert engine.traits.channels == ("disk",)  # there is no NCCL on the CPU
    check_serves(engine, old, 0)
    load(engine, new, 1)
    check_serves(engine, new, 1)
    load(engine, old, 2)
    check_serves(engine, old, 2)


def test_pause_aborts_and_the_rest_goes_on_with_new_weights(connect, policies):
    old, new = policies
    engine = connect(version=5)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, MANY, LONG)
        wait_until_running(engine, running)
        load(engine, new, 6)
        sequences = running.result(120)
    assert any(sequence.versions[-1] == 6 for sequence in sequences)
    for prompt, sequence in zip(MANY, sequences, strict=True):
        num_old = sequence.versions.count(5)
        assert sequence.versions == [5] * num_old + [6] * (480 - num_old)
        before, after = sequence.tokens[:num_old], sequence.tokens[num_old:]
        old.check_greedy(prompt, before)
        new.check_greedy([*prompt, *before], after)
    load(engine, old, 7)


def test_pause_waits_for_what_runs(connect, policies):
    old, new = policies
    engine = connect(version=3)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, MANY, LONG)
        wait_until_running(engine, running)
        load(engine, new, 4, "wait")
        assert all(sequence.versions == [3] * 480 for sequence in running.result(60))
    load(engine, old, 5)


def test_samples_differ_and_repeat(connect):
    engine = connect()
    settings = SamplingSettings(12, temperature=0.7, seed=3)
    first = [sequence.tokens for sequence in engine.generate([PROMPTS[0]] * 2, settings)]
    again = [sequence.tokens for sequence in engine.generate([PROMPTS[0]] * 2, settings)]
    assert first[0] != first[1]
    assert first == again


def test_wrong_folder_touches_nothing(connect, policies, tmp_path):
    engine = connect()
    engine.pause_generation()
    with pytest.raises(WeightSyncError, match=r"config\.json"):
        engine.update_weights_from_disk(str(tmp_path), 1).result(60)
    engine.abort_weight_update("wrong folder")
    assert engine.state is EngineState.PAUSED
    engine.continue_generation()
    check_serves(engine, policies[0], 0)


def test_failed_load_blocks_until_a_good_one(connect, policies, tmp_path):
    old, new = policies
    shutil.copytree(new.folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F99"'))  # the server alone notices
    engine = connect()
    engine.pause_generation()
    with pytest.raises(WeightSyncError, match="restart the server"):
        engine.update_weights_from_disk(str(tmp_path), 1).result(60)
    engine.abort_weight_update("unknown dtype")
    assert engine.state is EngineState.BROKEN
    assert engine.get_version() == -1
    with pytest.raises(WeightSyncError, match="no whole set of weights"):
        engine.continue_generation()
    load(engine, old, 2)
    check_serves(engine, old, 2)


def test_another_model_never_reaches_the_server(connect, policies, tmp_path):
    """A cut tensor would leave it beyond repair, a missing one would pass unnoticed."""
    old, new = policies
    engine = connect()
    engine.pause_generation()
    for change, message in ((cut_norm, "of another shape"), (drop_norm, r"lacks model\.norm")):
        folder = tmp_path / change.__name__
        shutil.copytree(new.folder, folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(WeightSyncError, match=message):
            engine.update_weights_from_disk(str(folder), 1).result(60)
        engine.abort_weight_update("another model")
        assert engine.state is EngineState.PAUSED
    engine.continue_generation()
    check_serves(engine, old, 0)


def cut_norm(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:64].clone()


def drop_norm(tensors):
    del tensors["model.norm.weight"]


def test_other_weights_are_noticed(connect, server_url):
    engine = connect(version=4)
    assert engine.get_version() == 4
    connect(version=0)  # another trainer, which has its own idea of the weights
    assert engine.get_version() == -1


def test_refusals_say_why(connect):
    with pytest.raises(WorkerError, match="greater than max_model_len=512"):
        connect().generate([[1] * 10], SamplingSettings(max_new_tokens=4000))
    with pytest.raises(ConfigError, match="token id 512"):  # it would end this server
        connect().generate([[512]], GREEDY)
    with pytest.raises(WorkerError, match=r"401.*API key"):
        connect(token="wrong").compute_logprobs([[1, 2]])


def test_group_requests_fit_the_package():
    """The NCCL channel needs a GPU; its requests must fit the server's own classes."""
    dialect = VllmDialect()
    spec = TensorSpec("model.norm.weight", (128,), "bfloat16")
    address = GroupAddress("127.0.0.1", 1, "g", 3, 1, "nccl", 5.0, unique_id=UNIQUE_ID)
    requests = {
        "init": dialect.join_group(address)[0].body["init_info"],
        "update": dialect.receive_bucket(Bucket(0, (spec,)), address)[0].body["update_info"],
    }
    code = """
import json, sys
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo
requests = json.load(sys.stdin)
print(len(NCCLWeightTransferInitInfo(**requests["init"]).nccl_unique_id_bytes))
print(NCCLWeightTransferUpdateInfo(**requests["update"]).names)
"""
    done = subprocess.run(
        [PYTHON, "-c", code],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["128", "['model.norm.weight']"]
