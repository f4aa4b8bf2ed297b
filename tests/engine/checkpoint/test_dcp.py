"""Sharded checkpoints: bitwise on every mesh, refused before anything changes, errors for all."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint

from fsdpbench.engine.checkpoint.dcp import check_random_states
from fsdpbench.engine.checkpoint.metadata import read_metadata
from fsdpbench.engine.checkpoint.state import DCPState
from tests.distributed.pool import run_on_ranks

DCP = "tests.distributed.payloads.checkpoint_dcp"
PARTS = ("weights", "states", "settings")


@pytest.fixture(scope="module")
def saved_on_four(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("dcp") / "saved")
    # the one place that starts four workers
    results = run_on_ranks(f"{DCP}:save", 4, folder=folder, backend="fsdp:d4", timeout_seconds=120)
    return folder, results


@pytest.mark.parametrize(
    ("backend", "ranks", "fields"),
    [
        ("fsdp:d2t2", 4, {}),
        ("fsdp:t2", 2, {}),
        ("fsdp:d2", 2, {"fsdp": {"offload_params": True}}),
        (
            "fsdp:d2",
            2,
            {"fsdp": {"offload_params": True, "per_layer_optim_step": True}},
        ),
    ],
    ids=["d2t2", "t2", "offload", "per-layer"],
)
def test_another_mesh_loads_every_bit(saved_on_four, backend, ranks, fields):
    folder, saved = saved_on_four
    loaded = run_on_ranks(
        f"{DCP}:load", ranks, folder=folder, backend=backend, timeout_seconds=60, **fields
    )
    for result in loaded:
        assert result["version"] == 7
        assert [result[name] for name in PARTS] == [saved[0][name] for name in PARTS]
    if ranks == 4:  # as many ranks: their random numbers go on, too
        assert [r["draw"] for r in loaded] == [r["draw"] for r in saved]
        assert len({str(r["draw"]) for r in saved}) == 4


def test_a_loaded_run_goes_on_as_the_saved_one(tmp_path):
    for went_on, resumed in run_on_ranks(
        f"{DCP}:resume", 2, folder=str(tmp_path / "saved"), timeout_seconds=60
    ):
        assert went_on == resumed


@pytest.mark.parametrize("weight_format", ["dcp", "hf"])
def test_a_rank_that_cannot_write_fails_all_and_the_old_checkpoint_stays(tmp_path, weight_format):
    results = run_on_ranks(
        f"{DCP}:fail_to_write",
        2,
        folder=str(tmp_path / "saved"),
        weight_format=weight_format,
        timeout_seconds=60,
    )
    kinds = {result["error"][0] for result in results}
    assert kinds <= {"CheckpointError", "PeerError"}
    assert "CheckpointError" in kinds
    for result in results:
        assert result["version"] == 1
        assert result["same"]
        assert result["left"] == []


@pytest.mark.parametrize(
    ("saved", "num_ranks", "fits"),
    [
        ({"rank0": {"host": torch.get_rng_state()}}, 1, True),
        ({"rank0": {"host": torch.get_rng_state()}}, 2, False),
        ({"rank1": {"host": torch.get_rng_state()}}, 1, False),
        ({"rank0": {"device": torch.get_rng_state()}}, 1, False),  # this process has none
        ({"rank0": {"host": torch.zeros(16, dtype=torch.uint8)}}, 1, False),  # of another torch
    ],
)
def test_random_states_come_back_where_they_fit(tmp_path, saved, num_ranks, fits):
    with warnings.catch_warnings(action="ignore"):  # torch warns of the missing process group
        torch_checkpoint.save({"engine": {"rng": saved}}, checkpoint_id=tmp_path)
    state = DCPState(torch.nn.Linear(1, 1))
    assert check_random_states(tmp_path, read_metadata(tmp_path), state, num_ranks) is fits
