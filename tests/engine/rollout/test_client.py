"""The HTTP engine against servers that answer as the real ones do."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from fsdpbench.engine.rollout.client import ServerSettings, connect_server
from fsdpbench.engine.rollout.generation import SamplingSettings
from fsdpbench.engine.rollout.states import EngineState
from fsdpbench.engine.weight_sync.records import Bucket, GroupAddress, TensorSpec
from fsdpbench.errors import ConfigError, WeightSyncError, WorkerError
from tests.engine.rollout.server_stub import write_weights

UNIQUE_ID = "A" * 172
ADDRESS = GroupAddress("10.0.0.1", 5000, "weights", 3, 1, "nccl", 5.0, unique_id=UNIQUE_ID)
BUCKETS = [
    Bucket(index, (TensorSpec(f"layer{index}.weight", (4, 8), "bfloat16"),)) for index in range(2)
]
SHAPES = {spec.name: list(spec.shape) for bucket in BUCKETS for spec in bucket.specs}
GREEDY = SamplingSettings(4, temperature=0.0)
DIALECTS = ["vllm", "sglang"]
SGLANG_INFO = {"tp_size": 2, "dp_size": 1, "pp_size": 1}


@pytest.fixture
def connect(stub):
    opened = []

    def connect_once(dialect, **settings):
        if dialect == "sglang":
            stub.server_info = (
                SGLANG_INFO if "tp_size" not in stub.server_info else stub.server_info
            )
        settings = {"timeout_seconds": 10.0, **settings}
        opened.append(connect_server(ServerSettings(stub.url, dialect, **settings)))
        stub.seen.clear()
        return opened[-1]

    yield connect_once
    for engine in opened:
        engine.close()


@pytest.fixture
def folder(stub, tmp_path):
    """Return a folder of the model that the server began with."""
    stub.folder = write_weights(tmp_path / "old", SHAPES, vocab_size=1000)
    return write_weights(tmp_path / "new", SHAPES, vocab_size=1000)


def update_from_disk(engine, folder, version, in_flight="abort"):
    engine.pause_generation(in_flight)
    engine.update_weights_from_disk(folder, version).result(10)
    engine.finish_weight_update(version).result(10)
    engine.continue_generation()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_connecting_learns_what_the_server_is(stub, connect, dialect):
    engine = connect(dialect, version=3)
    traits = engine.traits
    assert (traits.dialect, traits.world_size, traits.pipeline_size) == (dialect, 2, 1)
    assert (traits.channels, traits.gives_digests) == (("xccl", "disk"), False)
    assert stub.label == "3"
    assert engine.state is EngineState.READY
    assert engine.get_version() == 3


@pytest.mark.parametrize("dialect", DIALECTS)
def test_tokens_logprobs_and_versions(connect, dialect):
    (first, second) = connect(dialect).generate([[5, 6, 7], [8]], GREEDY)
    assert first.tokens == [3, 4, 5, 6]
    assert first.logprobs == pytest.approx([-0.3, -0.4, -0.5, -0.6])
    assert first.versions == [0] * 4
    assert first.finish_reason == "length"
    assert second.tokens == [1, 2, 3, 4]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_scores(connect, dialect):
    scores = connect(dialect).compute_logprobs([[5, 6, 7], [8], []])
    assert scores == [pytest.approx([-0.06, -0.07]), [], []]


@pytest.mark.parametrize(
    ("dialect", "paths"),
    [
        (
            "vllm",
            "/pause /collective_rpc /reset_prefix_cache /update_weight_version /resume",
        ),
        (
            "sglang",
            "/pause_generation /flush_cache /update_weights_from_disk /flush_cache "
            "/update_weight_version /continue_generation",
        ),
    ],
)
def test_disk_update_step_by_step(stub, folder, connect, dialect, paths):
    engine = connect(dialect)
    update_from_disk(engine, folder, 7)
    assert stub.paths() == paths.split()
    assert engine.get_version() == 7
    assert engine.generate([[1]], GREEDY)[0].versions == [7] * 4


@pytest.mark.parametrize(
    ("dialect", "paths"),
    [
        (
            "vllm",
            "/pause /init_weight_transfer_engine /start_weight_update /update_weights "
            "/update_weights /finish_weight_update /reset_prefix_cache /update_weight_version "
            "/resume /shutdown_weight_transfer_engine",
        ),
        (
            "sglang",
            "/pause_generation /flush_cache /init_weights_update_group /begin_weight_update "
            "/update_weights_from_distributed /update_weights_from_distributed "
            "/end_weight_update /flush_cache /update_weight_version /continue_generation "
            "/destroy_weights_update_group",
        ),
    ],
)
def test_group_update_step_by_step(stub, connect, dialect, paths):
    engine = connect(dialect)
    engine.pause_generation()
    engine.init_weights_update_group(ADDRESS).result(10)
    for bucket in BUCKETS:
        engine.update_weights_from_distributed(bucket).result(10)
        assert engine.get_version() == -1
        with pytest.raises(WeightSyncError, match="has not finished"):
            engine.continue_generation()
    engine.finish_weight_update(1).result(10)
    engine.continue_generation()
    engine.destroy_weights_update_group()
    assert stub.paths() == paths.split()
    assert engine.get_version() == 1


@pytest.mark.parametrize("dialect", DIALECTS)
def test_pause_aborts_and_the_rest_is_resubmitted(stub, folder, connect, dialect):
    engine = connect(dialect)
    stub.num_before_abort = 1
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, [[5, 6, 7]], GREEDY)
        assert stub.generating.wait(10)
        assert engine.num_requests == 1
        update_from_disk(engine, folder, 1)
        (sequence,) = running.result(10)
    assert sequence.tokens == [3, 4, 5, 6]
    assert sequence.versions == [0, 1, 1, 1]
    asked = stub.bodies("/v1/completions" if dialect == "vllm" else "/generate")
    prompts = [body.get("prompt") or body["input_ids"] for body in asked]
    assert prompts == [[5, 6, 7], [5, 6, 7, 3]]


def test_queued_requests_are_recalled(stub, folder, connect, monkeypatch):
    """One that reaches the server after its pause is not left there to get other weights."""
    monkeypatch.setattr("fsdpbench.engine.rollout.client.DRAIN_SECONDS", 0.05)
    engine = connect("vllm")
    stub.num_queued = 1
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, [[5, 6, 7]], GREEDY)
        assert stub.generating.wait(10)
        update_from_disk(engine, folder, 1)
        assert running.result(10)[0].versions == [1] * 4


@pytest.mark.parametrize("dialect", DIALECTS)
def test_waiting_is_done_on_this_side(stub, folder, connect, dialect):
    engine = connect(dialect)
    stub.delay_seconds = 0.3
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, [[5, 6, 7]], GREEDY)
        while not stub.seen:
            assert not running.done()
        update_from_disk(engine, folder, 1, "wait")
        (sequence,) = running.result(10)
    assert sequence.versions == [0] * 4
    assert stub.paths()[0] in ("/generate", "/v1/completions")
    assert stub.paths()[1].startswith("/pause")


def test_aborted_full_sequences_are_finished(stub, connect):
    engine = connect("vllm")
    stub.num_before_abort = 4
    stub.paused.set()
    assert engine.generate([[5]], GREEDY)[0].finish_reason == "length"


def test_endless_aborts_end(stub, connect, monkeypatch):
    monkeypatch.setattr("fsdpbench.engine.rollout.client.MAX_EMPTY_ABORTS", 3)
    monkeypatch.setattr("fsdpbench.engine.rollout.client.EMPTY_ABORT_SECONDS", 0.001)
    engine = connect("sglang")
    answer = b'{"meta_info": {"finish_reason": {"type": "abort"}}}'
    stub.overrides["/generate"] = (200, answer, 0.0)
    with pytest.raises(WorkerError, match="aborted one request 4 times"):
        engine.generate([[5]], GREEDY)


def test_failed_vllm_load_blocks_until_a_good_one(stub, folder, connect):
    engine = connect("vllm")
    stub.overrides["/collective_rpc"] = (500, b'{"error":{"message":"Worker failed"}}', 0.0)
    engine.pause_generation()
    with pytest.raises(WeightSyncError, match=r"loading .*Worker failed"):
        engine.update_weights_from_disk(folder, 1).result(10)
    engine.abort_weight_update("load failed")
    assert (engine.state, stub.label) == (EngineState.BROKEN, "broken")
    with pytest.raises(WeightSyncError, match="load failed"):
        engine.continue_generation()
    with pytest.raises(WeightSyncError, match="no whole set"):
        engine.compute_logprobs([[1, 2]])
    assert "/resume" not in stub.paths()
    stub.overrides.clear()
    update_from_disk(engine, folder, 2)
    assert engine.get_version() == 2


def test_failed_sglang_load_leaves_the_old_weights(stub, folder, connect):
    engine = connect("sglang")
    answer = b'{"success":false,"message":"Failed to update weights: no."}'
    stub.overrides["/update_weights_from_disk"] = (400, answer, 0.0)
    engine.pause_generation()
    with pytest.raises(WeightSyncError, match="Failed to update weights"):
        engine.update_weights_from_disk(folder, 1).result(10)
    engine.abort_weight_update("load failed")
    engine.continue_generation()
    assert engine.get_version() == 0


def test_unanswered_load_counts_as_half_done(stub, folder, connect):
    engine = connect("sglang", timeout_seconds=0.3)
    stub.overrides["/update_weights_from_disk"] = (200, b"{}", 20.0)
    engine.pause_generation()
    with pytest.raises(WeightSyncError, match="no whole answer"):
        engine.update_weights_from_disk(folder, 1).result(10)
    engine.abort_weight_update("silence")
    assert engine.state is EngineState.BROKEN


@pytest.mark.parametrize("dialect", DIALECTS)
def test_broken_bucket_closes_the_session(stub, connect, dialect):
    engine = connect(dialect)
    engine.pause_generation()
    engine.init_weights_update_group(ADDRESS).result(10)
    path = "/update_weights" if dialect == "vllm" else "/update_weights_from_distributed"
    stub.overrides[path] = (200, b'{"success": true}', 20.0)
    begin = time.monotonic()
    short = replace(ADDRESS, timeout_seconds=0.2)
    engine._address = short
    future = engine.update_weights_from_distributed(BUCKETS[0])
    engine.abort_weight_update("the trainer gave up")
    assert time.monotonic() - begin < 5
    assert engine.state is EngineState.BROKEN
    closing = "/finish_weight_update" if dialect == "vllm" else "/end_weight_update"
    assert closing in stub.paths()
    future.cancel()


def test_wrong_folder_touches_nothing(stub, connect, tmp_path):
    engine = connect("vllm")
    engine.pause_generation()
    with pytest.raises(WeightSyncError, match=r"config\.json"):
        engine.update_weights_from_disk(str(tmp_path), 1).result(10)
    engine.abort_weight_update("wrong folder")
    engine.continue_generation()
    assert engine.get_version() == 0
    assert stub.paths() == ["/pause", "/resume"]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"layer0.weight": [4, 8]}, r"lacks layer1\.weight"),
        ({**SHAPES, "layer1.weight": [4, 7]}, r"layer1\.weight \[4, 7\] instead of \[4, 8\]"),
        ({**SHAPES, "other": [2]}, "unexpected: other"),
    ],
)
def test_folders_of_another_model_touch_nothing(stub, folder, connect, tmp_path, shapes, message):
    engine = connect("vllm")
    engine.pause_generation()
    wrong = write_weights(tmp_path / "wrong", shapes)
    with pytest.raises(WeightSyncError, match=message):
        engine.update_weights_from_disk(wrong, 1).result(10)
    engine.abort_weight_update("wrong model")
    assert engine.state is EngineState.PAUSED
    assert stub.paths() == ["/pause"]


def test_buckets_of_another_model_touch_nothing(stub, folder, connect):
    engine = connect("sglang")
    engine.pause_generation()
    engine.init_weights_update_group(ADDRESS).result(10)
    other = Bucket(0, (TensorSpec("layer0.weight", (8, 8), "bfloat16"),))
    with pytest.raises(WeightSyncError, match="The server holds another model"):
        engine.update_weights_from_distributed(other).result(10)
    engine.abort_weight_update("wrong model")
    assert engine.state is EngineState.PAUSED


def test_missing_buckets_are_noticed_at_the_end(stub, folder, connect):
    engine = connect("vllm")
    engine.pause_generation()
    engine.init_weights_update_group(ADDRESS).result(10)
    engine.update_weights_from_distributed(BUCKETS[0]).result(10)
    with pytest.raises(WeightSyncError, match=r"lacks layer1\.weight"):
        engine.finish_weight_update(1).result(10)
    assert engine.get_version() == -1
    assert stub.paths()[-1] == "/update_weights"


def test_tokens_outside_the_vocabulary_stay_here(stub, folder, connect):
    engine = connect("vllm")
    with pytest.raises(ConfigError, match="token id 1000"):
        engine.generate([[1], [1000]], GREEDY)
    with pytest.raises(ConfigError, match="token id -1"):
        engine.compute_logprobs([[-1]])
    assert not stub.seen


def test_weights_never_change_while_it_generates(stub, folder, connect):
    engine = connect("vllm")
    with pytest.raises(WeightSyncError, match="Call pause_generation first"):
        engine.update_weights_from_disk(folder, 1).result(10)
    with pytest.raises(WeightSyncError, match="no update is under way"):
        engine.finish_weight_update(1).result(10)
    assert not stub.paths()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_restarted_server_is_noticed(stub, connect, dialect):
    engine = connect(dialect, version=5)
    stub.label = "default"
    assert engine.get_version() == -1


def test_server_without_versions(stub, folder, connect):
    stub.missing |= {"/weight_info", "/update_weight_version", "/server_info"}
    engine = connect("vllm")
    update_from_disk(engine, folder, 2)
    assert engine.get_version() == 2


@pytest.mark.parametrize(
    ("dialect", "info", "why"),
    [
        ("vllm", {"vllm_config": {"device_config": {"device": "cpu"}}}, "runs on the CPU"),
        ("vllm", {"vllm_config": {"model_config": {}}}, "--weight-transfer-config"),
        ("sglang", {"tp_size": 2, "dp_size": 2}, "dp_size=2"),
        ("sglang", {"tp_size": 2, "pp_size": 2}, "pp_size=2"),
    ],
)
def test_servers_without_groups_say_why(stub, connect, dialect, info, why):
    stub.server_info = info
    engine = connect(dialect)
    assert engine.traits.channels == ("disk",)
    with pytest.raises(WeightSyncError, match=f"{why}.*weight_update_mode to disk"):
        engine.init_weights_update_group(ADDRESS).result(10)


def test_logprobs_of_another_temperature_are_refused(stub, connect):
    config = {"model_config": {"logprobs_mode": "raw_logprobs"}}
    stub.server_info = {"vllm_config": config}
    engine = connect("vllm")
    assert engine.generate([[5]], GREEDY)
    with pytest.raises(ConfigError, match="processed_logprobs"):
        engine.generate([[5]], SamplingSettings(4, temperature=0.5))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("body", [b"{}", b"[]", b"null", b'{"choices": [1]}', b'{"meta_info": 1}'])
def test_answers_of_another_shape(stub, connect, dialect, body):
    engine = connect(dialect)
    for path in ("/v1/completions", "/generate"):
        stub.overrides[path] = (200, body, 0.0)
    with pytest.raises(WorkerError, match="not the expected shape"):
        engine.generate([[5]], GREEDY)
    with pytest.raises(WorkerError, match="not the expected shape"):
        engine.compute_logprobs([[5, 6]])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_other_servers_are_refused(stub, dialect):
    for path in ("/v1/models", "/model_info", "/get_world_size", "/server_info"):
        stub.overrides[path] = (200, b"[]", 0.0)
    with pytest.raises(WorkerError, match="not the expected shape"):
        connect_server(ServerSettings(stub.url, dialect, timeout_seconds=5.0))


def test_many_sequences_at_once(stub, connect):
    engine = connect("vllm", max_concurrent=8)
    sequences = engine.generate([[index] for index in range(64)], SamplingSettings(2))
    assert all(sequence.is_finished for sequence in sequences)
    seeds = {body["seed"] for body in stub.bodies("/v1/completions")}
    assert len(seeds) == 64
