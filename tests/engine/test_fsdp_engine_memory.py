"""Offload between steps, checkpoints amid training and adapters, through the facade."""

from __future__ import annotations

import numpy as np
import pytest

from tests.distributed.pool import run_on_ranks
from tests.engine.test_fsdp_engine import make_config

NUM_LAYERS = 4
PAYLOADS = "tests.distributed.payloads.engine_memory"


@pytest.mark.parametrize(
    "fsdp",
    [{}, {"per_layer_optim_step": True}, {"offload_params": True}],
    ids=["plain", "per-layer step", "offload_params"],
)
def test_an_offloaded_engine_goes_on_as_if_nothing_had_been(fsdp):
    config = make_config("tiny-llama", "d2", fsdp=fsdp)
    for found in run_on_ranks(f"{PAYLOADS}:offload_between_steps", 2, config=config):
        assert found["losses"] == found["plain"]
        assert found["states"] == [True, True, True]
        for text in found["refused"]:
            assert "the engine is offloaded" in text
            assert "engine.onloaded()" in text


@pytest.mark.parametrize("weight_format", ["dcp", "hf"])
def test_training_goes_on_from_a_checkpoint_on_another_mesh(tmp_path, weight_format):
    streamed = {"per_layer_optim_step": True}
    results = run_on_ranks(
        f"{PAYLOADS}:resume",
        2,
        first=make_config("tiny-qwen3", "d2", fsdp=streamed),
        second=make_config("tiny-qwen3", "t2", fsdp={"offload_params": True}),
        folder=str(tmp_path / "checkpoint"),
        weight_format=weight_format,
    )
    for found in results:
        assert found["version"] == 7
        np.testing.assert_allclose(*found["losses"], rtol=1e-5)
    before, after = results[0]["weights"]
    for name, values in before.items():
        np.testing.assert_allclose(values, after[name], rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("mesh", ["d2", "t2"])
def test_adapters_are_trained_saved_and_loaded(tmp_path, mesh):
    config = make_config(
        "tiny-llama",
        mesh,
        use_lora=True,
        lora_rank=4,
        target_modules=["q_proj", "down_proj"],
        optimizer={"lr": 1e-2},
        fsdp={"offload_params": mesh == "d2"},
    )
    results = run_on_ranks(
        f"{PAYLOADS}:train_adapters", 2, config=config, folder=str(tmp_path / "adapter")
    )
    moved = results[0]["moved"]  # a whole export has the adapters merged
    assert len(moved) == 2 * NUM_LAYERS
    assert {name.split(".")[-2] for name in moved} == {"q_proj", "down_proj"}
    for found in results:
        assert all("lora_" in name for name in found["trained"])
        fresh, trained, loaded = found["evaluated"]
        assert trained != fresh
        assert loaded == trained
