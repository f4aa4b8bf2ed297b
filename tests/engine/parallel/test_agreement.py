"""All ranks succeed or all fail; the rank with the error keeps it and the others name it."""

from __future__ import annotations

import pytest

from tests.distributed.pool import run_on_ranks

PAYLOAD = "tests.distributed.payloads.parallel_agreement:fail_on"


@pytest.mark.parametrize("failing", [[], [1], [0, 2]], ids=["none", "one", "two"])
def test_an_error_of_one_rank_reaches_all(failing):
    for rank, (kind, text, total) in enumerate(run_on_ranks(PAYLOAD, 3, failing=failing)):
        assert total == 3.0
        if not failing:
            assert kind == ""
        elif rank in failing:
            assert (kind, text) == ("OSError", f"disk {rank}")
        else:
            names = ", ".join(map(str, failing))
            assert kind == "PeerError"
            assert text == f"reading failed on rank {names}: OSError: disk {failing[0]}"
