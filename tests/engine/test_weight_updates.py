"""The facade's weight updates: what the rollout engines answer with is what the trainer has."""

from __future__ import annotations

import numpy as np
import pytest

from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.config.weight_sync import WeightUpdateMeta
from fsdpbench.engine.fsdp_engine import FSDPEngine
from fsdpbench.engine.weight_updates import build_updater
from fsdpbench.errors import ConfigError, FsdpbenchError
from tests.distributed.pool import run_on_ranks
from tests.engine.test_fsdp_engine import make_config


@pytest.mark.parametrize(
    ("mesh", "num_receivers", "changes"),
    [
        ("d2t2", 2, {"fsdp": {"offload_params": True}}),
        ("d2", 1, {"use_lora": True, "lora_rank": 4, "optimizer": {"lr": 1e-2}}),
    ],
    ids=["offloaded shards to two", "merged adapters to one"],
)
def test_receivers_answer_as_the_trainer_does(tmp_path, mesh, num_receivers, changes):
    config = make_config("tiny-qwen3", mesh, **changes)
    results = run_on_ranks(
        "tests.distributed.payloads.weight_updates:update_twice",
        4 if mesh == "d2t2" else 2,
        config=config,
        folder=str(tmp_path),
        num_receivers=num_receivers,
    )
    for found in results:
        assert "call connect_engine" in found["before"]
        assert [one["timings"]["mode"] for one in found["rounds"]] == ["xccl", "disk"]
    first, second = results[0]["rounds"]
    assert first["timings"]["num_buckets"] > 1
    assert first["own"] != second["own"]
    for version, one in enumerate((first, second), start=1):
        assert len(one["answers"]) == num_receivers
        for in_force, logprobs in one["answers"]:
            assert in_force == version
            np.testing.assert_allclose(logprobs, one["own"], rtol=1e-4, atol=1e-5)


class WithoutAdapters:
    adapters = None


class Parts:
    config = TrainEngineConfig()
    model = WithoutAdapters()


def test_adapters_alone_need_adapters():
    with pytest.raises(ConfigError, match="send_adapters=True: needs an engine with adapters"):
        build_updater(Parts(), (), WeightUpdateMeta(send_adapters=True))


class Updater:
    is_closed = False

    def close(self):
        self.is_closed = True


def test_a_destroyed_engine_has_left_its_rollout_engines():
    engine = FSDPEngine(TrainEngineConfig())
    engine._updater = updater = Updater()
    engine.destroy()
    assert updater.is_closed
    engine.destroy()
    with pytest.raises(FsdpbenchError, match="call connect_engine"):
        engine.update_weights()
