"""Steps go on during a save; at most one is in flight; errors come out at the next call."""

from __future__ import annotations

from fsdpbench.engine.checkpoint.verify import check_folder
from tests.distributed.payloads.checkpoint_kills import (
    WAIT_SECONDS,
    hear,
    leave_during_a_save,
    start,
)
from tests.distributed.pool import run_on_ranks

DCP = "tests.distributed.payloads.checkpoint_dcp"


def test_steps_go_on_and_errors_come_out_later(tmp_path):
    results = run_on_ranks(f"{DCP}:save_in_background", 2, folder=str(tmp_path), timeout_seconds=60)
    for result in results:
        assert result["loaded"] == result["saved"]
        assert result["first_is_there"]  # the second save waited for it
        kind, text = result["error"]
        assert kind == "CheckpointError"
        assert str(tmp_path / "third") in text
        assert "was not saved by this engine" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "first",
        "fourth",
        "latest",
        "second",
        "third",
    ]
    assert (tmp_path / "latest").read_text() == "fourth\n"
    assert [path.name for path in (tmp_path / "third").iterdir()] == ["notes.txt"]


def test_a_process_that_ends_waits_for_its_save(tmp_path):
    process, connection = start(leave_during_a_save, str(tmp_path / "saved"))
    assert hear(connection)  # it ended during the save
    process.join(WAIT_SECONDS)
    assert process.exitcode == 0
    check_folder(tmp_path / "saved", "dcp")
