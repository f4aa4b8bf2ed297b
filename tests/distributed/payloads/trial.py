"""Runs one rank of a benchmark trial inside the pool's process group."""

from __future__ import annotations

from pathlib import Path

from fsdpbench.bench.folders import TrialFolder
from fsdpbench.bench.rank_error import RankErrors
from fsdpbench.bench.worker import run_trial
from fsdpbench.ranks import Ranks


def run(rank: int, world_size: int, *, path: str) -> bool:
    """Run the trial in the folder `path`; True when it ended well."""
    folder = TrialFolder(Path(path))
    ranks = Ranks(rank, rank, world_size, world_size, launched=True)
    with RankErrors(folder, rank) as errors:
        run_trial(folder.load_spec(), folder, ranks, errors)
    return True
