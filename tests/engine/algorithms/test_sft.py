"""Supervised fine-tuning learns: the loss of a repeated batch falls on every mesh."""

from __future__ import annotations

import pytest

from tests.distributed.pool import run_on_ranks
from tests.engine.test_fsdp_engine import make_config


@pytest.mark.parametrize(("mesh", "world_size"), [("d1", 1), ("d1t2", 2)])
def test_the_loss_falls(mesh, world_size):
    config = make_config("tiny-llama", mesh, init_from_scratch=True, optimizer={"lr": 3e-3})
    results = run_on_ranks(
        "tests.distributed.payloads.engine_checks:overfit", world_size, config=config
    )
    for losses, evaluated in results:
        assert losses[-1] < 0.6 * losses[0]
        assert evaluated < losses[-1]
