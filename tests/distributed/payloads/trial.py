"""Runs one rank of a benchmark trial inside the pool's process group."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from fsdpbench.bench import timing, worker
from fsdpbench.bench.folders import TrialFolder
from fsdpbench.bench.rank_error import RankErrors
from fsdpbench.bench.worker import run_trial
from fsdpbench.ranks import Ranks


def run(rank: int, world_size: int, *, path: str) -> bool:
    """Run the trial in the folder `path`; True when it ended well."""
    folder = TrialFolder(Path(path))
    ranks = Ranks(rank, rank, world_size, world_size, launched=True)
    try:
        with RankErrors(folder, rank) as errors:
            run_trial(folder.load_spec(), folder, ranks, errors)
    finally:
        gc.unfreeze()  # a failing worker's process would end here; this one goes on
    return True


def count_objects(rank: int, world_size: int, *, path: str) -> list[tuple[bool, int, int]]:
    """Run the trial; return (collector on, objects set aside, others) as each step saw them."""
    seen: list[tuple[bool, int, int]] = []

    def time_step(step: Callable[[], object], synchronize: Callable[[], None]) -> object:
        seen.append((gc.isenabled(), gc.get_freeze_count(), len(gc.get_objects())))
        return timing.time_step(step, synchronize)

    with patch.object(worker, "time_step", time_step):
        assert run(rank, world_size, path=path)
    return [*seen, (gc.isenabled(), gc.get_freeze_count(), len(gc.get_objects()))]
