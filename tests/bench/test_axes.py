import pytest

from fsdpbench.bench.axes import iterate_grid, list_axis_names, list_backends, resolve_axes
from fsdpbench.engine.config.parallel import parse_backend
from fsdpbench.errors import ConfigError


def degrees_of(backends):
    strategies = [parse_backend(text).strategy for text in backends]
    return {(s.dp_size, s.cp_size, s.tp_size) for s in strategies}


@pytest.mark.parametrize("world_size", [1, 2, 4, 6, 8])
def test_all_means_every_factorisation(world_size):
    sizes = range(1, world_size + 1)
    expected = {
        (d, c, t) for d in sizes for c in sizes for t in sizes if d * c * t == world_size
    }  # fmt: skip
    assert degrees_of(list_backends(world_size, {})) == expected
    (axis,) = resolve_axes({"parallel": ["all"]}, world_size)
    assert degrees_of(axis.values) == expected


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        ({"tp": [1, 2]}, {(4, 1, 1), (2, 1, 2)}),
        ({"tp": [2], "cp": [1, 2]}, {(2, 1, 2), (1, 2, 2)}),
        ({"dp": [1, 2], "cp": ["all"], "tp": [1]}, {(1, 4, 1), (2, 2, 1)}),
        ({"dp": ["all"]}, {(4, 1, 1)}),
        ({"dp": [4, 3]}, {(4, 1, 1), (3, 1, 1)}),
        ({"tp": [2, 8]}, {(2, 1, 2), (1, 1, 8)}),
    ],
)
def test_degree_lists_span_the_factorisations_drawn_from_them(lists, expected):
    (axis,) = resolve_axes(lists, 4)
    assert (axis.name, axis.path) == ("parallel", "backend")
    assert degrees_of(axis.values) == expected


def test_names_lead_to_fields():
    axes = resolve_axes(
        {
            "fsdp.offload_params": [True],
            "model": ["tiny-llama"],
            "tokens_per_step": [64],
            "workload.seed": [1],
            "seed": [2],
            "fault": ["hang@1"],
            "optimizer": [None],
        },
        2,
    )
    assert [(axis.section, axis.path) for axis in axes] == [
        ("config", "fsdp.offload_params"),
        ("config", "path"),
        ("workload", "tokens_per_step"),
        ("workload", "seed"),
        ("config", "seed"),
        ("fault", "fault"),
        ("config", "optimizer"),
    ]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("offload_params", "fsdp.offload_params"),
        ("gradient_checkpoint", "gradient_checkpointing"),
        ("paralell", "parallel"),
        ("optimiser.lr", "optimizer.lr"),
        ("token_per_step", "tokens_per_step"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name, nearest):
    with pytest.raises(ConfigError, match=f"axes.{name}: is no field.*did you mean '{nearest}'"):
        resolve_axes({name: [1]}, 2)


def test_all_mistakes_are_named_at_once():
    axes = {"zzzzqqq": [1], "dp": [0], "tp": [True], "cp": [], "seed": 3}
    with pytest.raises(ConfigError) as caught:
        resolve_axes(axes, 2)
    found = [violation.where for violation in caught.value.violations]
    assert found == [f"axes.{name}" for name in axes]
    assert "docs/sweep.md" in str(caught.value)


@pytest.mark.parametrize(
    "names",
    [("parallel", "backend"), ("dp", "parallel"), ("model", "path"), ("optimizer.lr", "optimizer")],
)
def test_two_axes_for_one_field_are_refused(names):
    values = {"dp": [1], "optimizer.lr": [1.0], "optimizer": [None]}
    with pytest.raises(ConfigError, match="sets the same field as"):
        resolve_axes({name: values.get(name, ["x"]) for name in names}, 1)


def test_the_grid_turns_the_last_axis_fastest():
    axes = resolve_axes({"seed": [1, 2], "gradient_checkpointing": [False, True]}, 1)
    points = [tuple(value for _, value in point) for point in iterate_grid(axes)]
    assert points == [(1, False), (1, True), (2, False), (2, True)]


def test_every_listed_name_resolves():
    names = [name for name in list_axis_names() if name not in ("dp", "cp", "tp")]
    assert len(names) > 40
    for name in names:
        (axis,) = resolve_axes({name: ["x"]}, 1)
        assert axis.name == name
