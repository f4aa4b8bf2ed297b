"""A kill at any moment of a save leaves a checkpoint that loads: the old one or the new one."""

from __future__ import annotations

import pytest

from tests.distributed.payloads.checkpoint_kills import kill_while_saving


@pytest.mark.parametrize(
    "num_kills", [5, pytest.param(20, marks=pytest.mark.slow)], ids=["5", "20"]
)
@pytest.mark.parametrize("weight_format", ["dcp", "hf"])
def test_a_killed_save_leaves_the_old_or_the_new_checkpoint(tmp_path, weight_format, num_kills):
    for heard, loaded in kill_while_saving(tmp_path / "saved", weight_format, num_kills):
        assert heard <= loaded <= heard + 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "saved"]
