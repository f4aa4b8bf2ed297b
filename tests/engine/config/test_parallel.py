"""Degrees, their rules and the backend string."""

from __future__ import annotations

import itertools

import pytest

from fsdpbench.engine.config.parallel import (
    FSDPParallelStrategy,
    ParallelStrategy,
    format_backend,
    parse_backend,
)
from fsdpbench.errors import ConfigError


def violations_of(build):
    with pytest.raises(ConfigError) as caught:
        build()
    return caught.value.violations


@pytest.mark.parametrize(
    ("text", "dp", "cp", "tp"),
    [
        ("fsdp:d4c2t1", 4, 2, 1),
        ("fsdp:d4p1t1", 4, 1, 1),
        ("fsdp:d2", 2, 1, 1),
        ("fsdp:t8", 1, 1, 8),
        ("fsdp:t2c4d16", 16, 4, 2),
        ("fsdp:d12e1p1", 12, 1, 1),
    ],
)
def test_backends_parse(text, dp, cp, tp):
    backend = parse_backend(text)
    strategy = backend.strategy
    assert (backend.engine, strategy.dp_size, strategy.cp_size, strategy.tp_size) == (
        "fsdp",
        dp,
        cp,
        tp,
    )
    assert strategy.world_size == dp * cp * tp
    assert isinstance(strategy, FSDPParallelStrategy)


@pytest.mark.parametrize(("dp", "cp", "tp"), list(itertools.product((1, 2, 16), repeat=3)))
def test_format_and_parse_are_inverse(dp, cp, tp):
    strategy = FSDPParallelStrategy(
        data_parallel_size=dp, context_parallel_size=cp, tensor_parallel_size=tp
    )
    assert format_backend(strategy) == f"fsdp:d{dp}c{cp}t{tp}"
    assert parse_backend(format_backend(strategy)).strategy == strategy


def test_format_names_the_axes_that_fsdp_refuses():
    strategy = ParallelStrategy(
        data_parallel_size=4, pipeline_parallel_size=2, expert_parallel_size=2
    )
    assert format_backend(strategy, "megatron") == "megatron:d4p2c1t1e2"


@pytest.mark.parametrize(
    ("text", "positions"),
    [
        ("", [0]),
        ("d4", [0]),
        ("fsdp", [0]),
        ("FSDP:d4", [0]),
        ("megatron:d4p2", [0]),
        ("fsdp:", [5]),
        ("fsdp:d", [6]),
        ("fsdp:d0", [6]),
        ("fsdp:d2d2", [7]),
        ("fsdp:d4x2", [7]),
        ("fsdp:D4", [5]),
        ("fsdp:4", [5]),
        ("fsdp:d2 t2", [7]),
        ("fsdp:d2-t2", [7]),
        ("fsdp:d2.5", [7]),
        ("fsdp:dt2", [6]),
        ("fsdp:d2x3c0", [7, 10]),
        ("fsdp:d2p2", [7]),
        ("fsdp:p2d2", [5]),
        ("fsdp:d2p3e2", [7, 9]),
        ("fsdp:d1234567890123", [15]),
    ],
)
def test_errors_name_positions(text, positions):
    found = violations_of(lambda: parse_backend(text))
    assert {v.where for v in found} == {"backend"}
    assert {v.found for v in found} == {repr(text)}
    said = sorted(int(v.allowed.removeprefix("at position ").partition(":")[0]) for v in found)
    assert said == positions
    assert all(v.remedy for v in found)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fsdp:d2p2", ["no pipeline", "Megatron-like", "pipeline_parallel_size=2"]),
        ("fsdp:d2e2", ["dense models", "Archon-like", "expert_parallel_size=2"]),
        ("megatron:d2p2", ["another system", "Megatron-like"]),
        ("archon:d2", ["another system", "Archon-like"]),
    ],
)
def test_the_engine_selection_rule_is_told(text, words):
    message = str(violations_of(lambda: parse_backend(text))[-1])
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("degrees", "fits"),
    [
        ({"data_parallel_size": 4, "expert_parallel_size": 4}, True),
        ({"data_parallel_size": 4, "expert_parallel_size": 2}, True),
        ({"data_parallel_size": 4, "expert_parallel_size": 3}, False),
        ({"tensor_parallel_size": 8, "expert_parallel_size": 8}, True),
        (
            {
                "data_parallel_size": 4,
                "pipeline_parallel_size": 2,
                "expert_parallel_size": 2,
                "expert_tensor_parallel_size": 2,
            },
            True,
        ),
        (
            {
                "data_parallel_size": 2,
                "pipeline_parallel_size": 2,
                "expert_parallel_size": 2,
                "expert_tensor_parallel_size": 2,
            },
            False,
        ),
        ({"data_parallel_size": 3, "expert_tensor_parallel_size": 2}, True),  # no experts
    ],
)
def test_experts_divide_the_world(degrees, fits):
    if fits:
        assert ParallelStrategy(**degrees).expert_parallel_size
        return
    (violation,) = violations_of(lambda: ParallelStrategy(**degrees))
    assert violation.where == "expert_parallel_size"


@pytest.mark.parametrize(
    "name", ["pipeline_parallel_size", "expert_parallel_size", "expert_tensor_parallel_size"]
)
def test_fsdp_refuses_foreign_axes(name):
    found = violations_of(lambda: FSDPParallelStrategy(data_parallel_size=4, **{name: 2}))
    assert [v.where for v in found] == [name]
    assert "-like engine" in found[0].allowed


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None])
def test_degrees_are_counts(value):
    (violation,) = violations_of(lambda: ParallelStrategy(data_parallel_size=value))
    assert violation.where == "data_parallel_size"


def test_all_six_degrees_default_to_one():
    assert set(ParallelStrategy().model_dump().values()) == {1}
    assert len(ParallelStrategy.model_fields) == 6
    assert ParallelStrategy(
        tensor_parallel_size=2,
        pipeline_parallel_size=3,
        data_parallel_size=5,
        context_parallel_size=7,
    ).world_size == (2 * 3 * 5 * 7)
