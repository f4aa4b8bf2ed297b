"""One call for every format; what does not suit is refused before anything changes."""

from __future__ import annotations

from tests.distributed.pool import run_on_ranks

DCP = "tests.distributed.payloads.checkpoint_dcp"


def test_unsuitable_checkpoints_are_refused_before_anything_changes(tmp_path):
    said, other = run_on_ranks(f"{DCP}:refuse", 2, folder=str(tmp_path), timeout_seconds=60)
    assert (
        {kind for kind, _ in said.values()} == {"CheckpointError"} == {k for k, _ in other.values()}
    )
    said = {name: text for name, (_, text) in said.items()}
    assert "holds no optimizer states" in said["no optimizer"]
    assert "missing backbone.lm_head.weight" in said["other model"]
    assert "unexpected backbone.model.layers.0.self_attn.q_norm.weight" in said["other model"]
    assert "1.distcp" in said["other model"]
    assert "holds no optimizer states" in said["other optimizer"]
    assert "holds no optimizer states" in said["no optimizer, no states"]
    assert "Set weight_format to hf" in said["other format"]
    assert "no folder optimizer inside" in said["no optimizer in hf"]


def test_a_rank_without_memory_for_the_state_fails_all(tmp_path):
    for rank, result in enumerate(
        run_on_ranks(f"{DCP}:fail_to_collect", 2, folder=str(tmp_path), timeout_seconds=60)
    ):
        assert len(result["said"]) == 6
        for kind, text in result["said"].values():
            assert kind == ("RuntimeError" if rank == 1 else "PeerError")
            assert "no memory" in text
        assert result["same"]


def test_weights_that_are_loaded_alone_have_no_rounding_to_carry(tmp_path):
    folder = str(tmp_path / "saved")
    assert all(run_on_ranks(f"{DCP}:forget_rounding", 2, folder=folder, timeout_seconds=60))
