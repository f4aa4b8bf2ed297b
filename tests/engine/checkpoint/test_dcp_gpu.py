"""Checkpoints of shards on GPUs, and of shards and states in host memory beside a GPU."""

from __future__ import annotations

import pytest

from tests.distributed.pool import run_on_ranks

PAYLOAD = "tests.distributed.payloads.checkpoint_dcp:save_and_load_on_gpus"
OFFLOAD = {"fsdp": {"offload_params": True}}
STREAMED = {"fsdp": {"per_layer_optim_step": True}}


@pytest.mark.parametrize(
    ("num_ranks", "weight_format", "fields"),
    [
        pytest.param(1, "dcp", {}, marks=pytest.mark.gpu, id="dcp"),
        pytest.param(1, "hf", {}, marks=pytest.mark.gpu, id="hf"),
        pytest.param(1, "dcp", OFFLOAD, marks=pytest.mark.gpu, id="dcp-offload"),
        pytest.param(1, "dcp", STREAMED, marks=pytest.mark.gpu, id="dcp-streamed"),
        pytest.param(2, "dcp", {}, marks=pytest.mark.multi_gpu, id="dcp-2"),
        pytest.param(2, "hf", OFFLOAD, marks=pytest.mark.multi_gpu, id="hf-offload-2"),
    ],
)
def test_everything_comes_back(tmp_path, num_ranks, weight_format, fields):
    for result in run_on_ranks(
        PAYLOAD,
        num_ranks,
        device_type="cuda",
        folder=str(tmp_path / "saved"),
        weight_format=weight_format,
        timeout_seconds=60,
        **fields,
    ):
        saved, loaded = result["states"]
        assert saved == loaded
        assert result["changed"]
        assert result["version"] == 7
        assert result["draws"][0] == result["draws"][1]
