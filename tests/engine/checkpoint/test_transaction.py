"""Ranks fill one folder; all succeed or all fail, and a failure leaves nothing."""

from __future__ import annotations

import pytest

from tests.distributed.pool import run_on_ranks

PAYLOAD = "tests.distributed.payloads.checkpoint_transaction:save_files"


@pytest.mark.parametrize(
    ("failure", "kinds", "said"),
    [
        ("", ["", ""], ""),
        ("body", ["ValueError", "PeerError"], "disk on fire"),
        ("unseen", ["CheckpointError", "PeerError"], "file system that all ranks share"),
        ("target", ["CheckpointError", "PeerError"], "not saved by this engine"),
    ],
    ids=["none", "body", "unseen", "target"],
)
def test_all_succeed_or_fail(tmp_path, failure, kinds, said):
    target = tmp_path / "saved"
    if failure == "target":
        target.mkdir()
        (target / "notes.txt").touch()
    results = run_on_ranks(PAYLOAD, 2, path=str(target), failure=failure, timeout_seconds=60)
    assert [kind for kind, _ in results] == kinds
    assert all(said in text for _, text in results)
    assert not list(tmp_path.glob(".*"))
    names = {"": ["0", "1", "fsdpbench.json"], "target": ["notes.txt"]}.get(failure)
    assert (sorted(p.name for p in target.iterdir()) if target.exists() else None) == names
