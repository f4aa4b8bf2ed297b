"""Updates that arrive on every receiver, and failures that end on both sides and are named."""

from __future__ import annotations

import pytest

from fsdpbench.engine.config.weight_sync import WeightUpdateMeta
from fsdpbench.engine.device import Device
from fsdpbench.engine.weight_sync.source import SourceModel
from fsdpbench.engine.weight_sync.update import UpdaterState, VerificationError, WeightUpdater
from fsdpbench.errors import ConfigError, WeightSyncError
from tests.distributed.pool import run_on_ranks
from tests.engine.weight_sync.engines import TableEngine

PAYLOAD = "tests.distributed.payloads.weight_sync_update"
SHORT_SECONDS = 6.0  # joining takes part of it on a machine that is busy
LONG_SECONDS = 30.0


@pytest.mark.parametrize(
    ("backend", "path", "meta", "traits", "fields"),
    [
        pytest.param(
            "fsdp:d2t2",
            "tiny-qwen3",
            {},
            {"pipeline_size": 2},
            {},
            id="d2t2, tied weights, two stages",
        ),
        pytest.param(
            "fsdp:d2t2",
            "tiny-llama",
            {},
            {},
            {"use_lora": True, "lora_rank": 4},
            id="d2t2, adapters merged",
        ),
        pytest.param(
            "fsdp:d2",
            "tiny-llama",
            {},
            {"takes_adapters": True},
            {"use_lora": True, "lora_rank": 4, "adapters_only": True},
            id="d2, adapters alone",
        ),
        pytest.param(
            "fsdp:d2",
            "tiny-llama",
            {"wire_dtype": "float32"},
            {"takes_packed": False},
            {"fsdp": {"offload_params": True}},
            id="d2, offloaded shards, one message a tensor",
        ),
    ],
)
def test_sharded_weights_arrive_on_two_receivers(backend, path, meta, traits, fields):
    num_ranks = 4 if "t2" in backend else 2
    result, *_ = run_on_ranks(
        f"{PAYLOAD}:sharded",
        num_ranks,
        backend=backend,
        path=path,
        meta=meta,
        traits=traits,
        timeout_seconds=60,
        **fields,
    )
    assert result["equal"] == [True, True]
    assert result["states"] == [(2, False), (2, False)]
    timings = result["timings"][1]
    assert timings["num_bytes"] > 0
    assert all(timings[f"{phase}_seconds"] > 0 for phase in ("gather", "pack", "transfer"))
    assert timings["pause_seconds"] > timings["verify_seconds"] > 0
    if "pipeline_size" in traits:
        first, last = result["stages"]
        assert "model.embed_tokens.weight" in first
        assert "model.embed_tokens.weight" in last
        assert len({*first, *last}) == len(first) + len(last) - 1


def end_of(faults, meta=None, folder="", timeout_seconds=LONG_SECONDS):
    results = run_on_ranks(
        f"{PAYLOAD}:failing",
        2,
        faults=faults,
        meta={"timeout_seconds": timeout_seconds, **(meta or {})},
        folder=str(folder),
        timeout_seconds=60,
    )
    # the time-out, the grace after it and the last word to engines that may hang
    limit = 2 * SHORT_SECONDS + 2.0 if timeout_seconds == SHORT_SECONDS else LONG_SECONDS / 2
    assert all(result["seconds"] < limit for result in results)
    return results


@pytest.mark.parametrize(
    ("faults", "said", "states"),
    [
        (["", "absent"], "Missing ranks: 2", [(0, False), (0, False)]),
        (["wrong world size"], r"receiver 0 \(local\): joining .* outside 1", [(0, False)]),
        (
            ["", "die at bucket 2"],
            r"receiver 1 .* has ended.*Incomplete.*: receiver 0 .*Not answering: receiver 1",
            [(-1, True)],
        ),
        (["hang at bucket 1"], "no answer within 6 s|did not end within 6 s", []),
        (["another model"], "no such weight here", [(0, False)]),
    ],
    ids=lambda value: "+".join(map(str, value)) if isinstance(value, list) else "",
)
def test_a_receiver_that_fails_ends_both_sides_and_is_named(faults, said, states):
    waits = any(fault == "absent" or fault.startswith("hang") for fault in faults)
    trainer, peer = end_of(faults, timeout_seconds=SHORT_SECONDS if waits else LONG_SECONDS)
    assert trainer["outcome"].startswith("WeightSyncError: ")
    with pytest.raises(RuntimeError, match=said):
        raise RuntimeError(trainer["outcome"])
    remedies = ("switch weight_update_mode to disk", "the same model", "Start it with")
    assert any(remedy in trainer["outcome"] for remedy in remedies)
    assert peer["outcome"].startswith("PeerError: ")
    assert trainer["states"] == states
    assert not trainer["connected"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("corrupt", "other values: model.layers.0.w."),
        ("stale", "has version 0 in force instead of 1"),
    ],
)
def test_wrong_weights_stop_the_run_even_where_disk_could_follow(fault, said, tmp_path):
    trainer, peer = end_of([fault], {"on_failure": "disk"}, tmp_path)
    assert trainer["outcome"].startswith("VerificationError: ")
    assert said in trainer["outcome"]
    assert peer["outcome"].startswith("PeerError: ")
    assert trainer["states"][0][1], "the engine stays paused"


def test_a_failed_update_goes_through_the_disk_if_so_configured(tmp_path):
    trainer, peer = end_of(["", "reset at bucket 2"], {"on_failure": "disk"}, tmp_path)
    assert trainer["outcome"] == peer["outcome"] == "disk"
    assert trainer["mode"] == peer["mode"] == "disk"
    assert trainer["states"] == [(1, False), (1, False)]


def test_the_disk_channel_verifies_too_and_names_who_cannot_read(tmp_path):
    trainer, _ = end_of([""], {"type": "disk"}, tmp_path / "good")
    assert (trainer["outcome"], trainer["states"]) == ("disk", [(1, False)])
    trainer, peer = end_of(["", "cannot read"], {"type": "disk"}, tmp_path / "bad")
    assert "receiver 1 (local): loading" in trainer["outcome"]
    assert "no such folder here" in trainer["outcome"]
    assert peer["outcome"].startswith("PeerError: ")
    assert trainer["states"][1] == (0, False), "old weights stay in force"


def test_a_thousand_updates_leave_nothing_behind():
    (result,) = run_on_ranks(f"{PAYLOAD}:many", 1, count=1000, timeout_seconds=60)
    assert result["version"] == 1000
    assert result["growth"]["handles"] <= 0
    assert result["growth"]["threads"] <= 0
    assert result["growth"]["bytes"] < 8 << 20
    assert result["late_seconds"] < 3 * result["early_seconds"] + 0.01


def test_an_updater_without_engines_or_after_its_end_says_so():
    meta = WeightUpdateMeta(timeout_seconds=5)
    updater = WeightUpdater([], meta, SourceModel((), 1), Device("cpu"))
    with pytest.raises(WeightSyncError, match="no rollout engine was given"):
        updater.connect()
    updater.close()
    assert updater.state is UpdaterState.CLOSED
    with pytest.raises(WeightSyncError, match="was closed; connect anew"):
        updater.update(1, list)


def test_a_mistake_of_the_trainer_frees_the_engines():
    engine = TableEngine(pause_generation=None, init_weights_update_group=KeyError("bug"))
    updater = WeightUpdater(
        [engine], WeightUpdateMeta(timeout_seconds=1), SourceModel((), 1), Device("cpu")
    )
    with pytest.raises(WeightSyncError, match="'bug'"):
        updater.update(1, list)
    assert engine.calls[-3:] == [
        "destroy_weights_update_group",
        "get_version",
        "continue_generation",
    ]
    updater.close()


@pytest.mark.parametrize("version", [-1, True, 1.5, "3", None])
def test_a_version_that_engines_could_not_tell_is_refused(version):
    engine = TableEngine()
    updater = WeightUpdater([engine], WeightUpdateMeta(), SourceModel((), 1), Device("cpu"))
    with pytest.raises(ConfigError, match=r"version=.*must be a whole number from 0"):
        updater.update(version, list)
    assert engine.calls == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("a rank died")])
def test_an_interrupt_between_two_phases_frees_the_engines(monkeypatch, error):
    engine = TableEngine()
    meta = WeightUpdateMeta(timeout_seconds=5)
    updater = WeightUpdater([engine], meta, SourceModel((), 1), Device("cpu"))
    updater.state = UpdaterState.CONNECTED

    def begin_walk():
        raise error

    with pytest.raises(type(error)):
        updater.update(1, begin_walk)
    assert engine.calls == [
        "pause_generation",
        "abort_weight_update",
        "destroy_weights_update_group",
        "get_version",
        "continue_generation",
    ]
    updater.close()


def test_an_interrupt_does_not_wait_for_other_ranks():
    engine = TableEngine(get_version=KeyboardInterrupt())
    updater = WeightUpdater([engine], WeightUpdateMeta(), SourceModel((), 1), Device("cpu"))
    walked = []

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        updater._lead("a test", interrupt, (walked.append(one) for one in range(3)))
    assert walked == []
    assert engine.calls[0] == "abort_weight_update"


def test_an_engine_with_wrong_weights_is_not_continued_by_a_later_failure(tmp_path):
    engine = TableEngine(finish_weight_update={"extra": "float32[1]:0"})
    meta = WeightUpdateMeta(type="disk", path=str(tmp_path), verify=True, timeout_seconds=5)
    source = SourceModel((), 1)
    updater = WeightUpdater([engine], meta, source, Device("cpu"), publish=lambda _: tmp_path)
    with pytest.raises(VerificationError, match="never sent: extra"):
        updater.update(1, list)
    engine.answers["pause_generation"] = OSError("no route")
    with pytest.raises(WeightSyncError, match="no route"):
        updater.update(2, list)
    updater.close()
    later = WeightUpdater([engine], meta, source, Device("cpu"))
    with pytest.raises(WeightSyncError, match="no way to write"):
        later.connect()
    later.close()
    assert "continue_generation" not in engine.calls
    engine.answers.clear()
    again = WeightUpdater([engine], meta, source, Device("cpu"), publish=lambda _: tmp_path)
    again.update(1, list)
    again.close()
    assert engine.calls[-1] == "continue_generation"
