"""Skips what this machine has no GPU for; keeps the presets of a test run in one folder."""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing import resource_tracker

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell without job control starts background commands so; tests send Ctrl-C on purpose
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart():
    # before any test changes the environment or signals that it would inherit
    resource_tracker.ensure_running()


@pytest.fixture(scope="session", autouse=True)
def preset_cache(tmp_path_factory):
    """Give the run its own cache of preset models, unless the caller named one."""
    if "FSDPBENCH_CACHE" not in os.environ:
        os.environ["FSDPBENCH_CACHE"] = str(tmp_path_factory.mktemp("cache"))


def pytest_terminal_summary(terminalreporter):
    pool = sys.modules.get("tests.distributed.pool")
    deaths = pool.list_deaths() if pool else []
    if deaths:
        terminalreporter.line(f"workers that died between calls, by exit code: {deaths}")


def pytest_collection_modifyitems(items):
    marked = [item for item in items if any(item.iter_markers(name="gpu"))]
    marked += [item for item in items if any(item.iter_markers(name="multi_gpu"))]
    if not marked:
        return
    import torch

    found = torch.cuda.device_count()
    for item in marked:
        needed = 2 if item.get_closest_marker("multi_gpu") else 1
        if found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), found {found}"))
