from __future__ import annotations

import pytest

from fsdpbench.reports.run import load_run
from tests.reports.example_runs import make_mixed_records, write_run


@pytest.fixture(scope="session")
def mixed_path(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "mixed", make_mixed_records())


@pytest.fixture(scope="session")
def mixed_run(mixed_path):
    return load_run(mixed_path)
