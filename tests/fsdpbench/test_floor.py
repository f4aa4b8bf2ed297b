"""The floor: messages, numbers as people read them, ranks, the cache folder, warnings said once."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from fsdpbench.errors import ConfigError, FsdpbenchError, TopologyError, Violation, list_names
from fsdpbench.log import configure_logging, get_logger, warn_once
from fsdpbench.ranks import Ranks, read_ranks
from fsdpbench.settings import cache_dir
from fsdpbench.units import format_bytes, format_rate, format_seconds


def test_a_violation_says_where_what_allowed_remedy():
    violation = Violation("parallel.tensor", "3", "must divide 8", "use 1, 2, 4 or 8")
    assert str(violation) == "parallel.tensor=3: must divide 8; use 1, 2, 4 or 8"
    assert str(Violation("addr", "")) == "addr"


@pytest.mark.parametrize("kind", [ConfigError, TopologyError])
def test_violations_come_together(kind):
    error = kind([Violation("a", "1", "no"), Violation("b", "2", "no")])
    assert str(error) == "a=1: no\nb=2: no"
    assert isinstance(error, ValueError)
    assert isinstance(error, FsdpbenchError)
    assert kind("text").violations == (Violation("text", ""),)


def test_names_are_listed_up_to_a_limit():
    assert list_names("abc") == "a, b, c"
    assert list_names("abcdefgh") == "a, b, c, d, e and 3 more"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0 B"), (1536, "1.50 KiB"), (3 << 30, "3.00 GiB"), (5 << 20, "5.00 MiB")],
)
def test_bytes(value, text):
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.85, "850 ms"),
        (12.34, "12.3 s"),
        (245, "4 min 05 s"),
        (3661, "1 h 01 min"),
    ],
)
def test_seconds(value, text):
    assert format_seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (12, "12.0"), (45900, "45.9k"), (7e6, "7.0M"), (2e9, "2.0G")]
)
def test_rates(value, text):
    assert format_rate(value) == text


def test_ranks_come_from_the_launcher(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert read_ranks() == Ranks()
    for name, value in (("RANK", "3"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert read_ranks() == Ranks(3, 1, 4, 1, launched=True)


def test_the_cache_folder(monkeypatch):
    monkeypatch.setenv("FSDPBENCH_CACHE", "/somewhere")
    assert cache_dir() == Path("/somewhere")
    monkeypatch.delenv("FSDPBENCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/fsdpbench")


def test_a_warning_is_said_once(caplog):
    logger = get_logger("fsdpbench.test_floor")
    for _ in range(3):
        warn_once(logger, "field x is ignored")
    assert [record.message for record in caplog.records] == ["field x is ignored"]


def test_logging_names_the_rank(capsys):
    root = logging.getLogger("fsdpbench")
    before = root.handlers[:], root.level, root.propagate
    try:
        configure_logging(rank=3)
        get_logger("fsdpbench.x").info("hello")
        assert "[rank3] INFO fsdpbench.x: hello" in capsys.readouterr().err
    finally:
        root.handlers[:], root.level, root.propagate = before
