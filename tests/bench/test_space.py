import pytest

from fsdpbench.bench.space import SweepSpace, combine, load_space, parse_axes, parse_axis
from fsdpbench.errors import ConfigError


@pytest.mark.parametrize(
    ("option", "name", "values"),
    [
        ("parallel=fsdp:d1,fsdp:d2t2", "parallel", ["fsdp:d1", "fsdp:d2t2"]),
        ("x=true,false,null", "x", [True, False, None]),
        ("lr=1e-4,0.1,1", "lr", [1e-4, 0.1, 1]),
        ("lengths=[64,32],[128]", "lengths", [[64, 32], [128]]),
        ("optimizer={type: sgd, lr: 1e-3},null", "optimizer", [{"type": "sgd", "lr": 1e-3}, None]),
        ('s="1","a,b"', "s", ["1", "a,b"]),
        ("fault=hang@2,none", "fault", ["hang@2", "none"]),
        ("a=b=c", "a", ["b=c"]),
    ],
)
def test_values_are_yaml(option, name, values):
    parsed = parse_axis(option)
    assert parsed == (name, values)
    assert [type(value) for value in parsed[1]] == [type(value) for value in values]


@pytest.mark.parametrize("option", ["x", "x=", "=1", "x=[1", "x={", "", "x= "])
def test_options_that_are_no_axis_are_refused(option):
    with pytest.raises(ConfigError, match="--axis="):
        parse_axis(option)


def test_an_axis_is_given_once():
    assert parse_axes(["a=1", "b=2"]) == {"a": [1], "b": [2]}
    with pytest.raises(ConfigError, match="a second time"):
        parse_axes(["a=1", "a=2"])


def test_a_file_is_read(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text(
        "kind: sweep\nmodel: tiny-llama\nbase: {optimizer: {lr: 1e-4}}\n"
        "axes:\n  parallel: [fsdp:d1, fsdp:d2]\nworld_size: 4\n"
    )
    space = load_space(path)
    assert space.axes == {"parallel": ["fsdp:d1", "fsdp:d2"]}
    assert space.base == {"optimizer": {"lr": 1e-4}}
    assert (space.model, space.world_size, space.preset) == ("tiny-llama", 4, "quick")
    path.write_text("")
    assert load_space(path) == SweepSpace()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("axis: {}", "did you mean axes"),
        ("- 1", "must be a mapping"),
        ("a: [", "is no valid YAML"),
        ("axes: {}\naxes: {}", "'axes' is given twice"),
        ("preset: quik", "use quick, mesh, memory"),
        ("world_size: 0", "world_size"),
        ("kind: sft", "kind"),
        ("timeout_seconds: -1", "timeout_seconds"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path, content, message):
    path = tmp_path / "space.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_space(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none.yaml: cannot be read"):
        load_space(tmp_path / "none.yaml")


def test_options_change_what_they_name_and_nothing_else():
    space = SweepSpace(axes={"seed": [1], "dtype": ["float32"]}, workload={"steps": 3}, model="m")
    changed = combine(
        space,
        {
            "axes": {"seed": [2]},
            "workload": {"data": "f"},
            "model": None,
            "world_size": 4,
            "preset": "",
        },
    )
    assert changed.axes == {"seed": [2], "dtype": ["float32"]}
    assert changed.workload == {"steps": 3, "data": "f"}
    assert (changed.model, changed.world_size, changed.preset) == ("m", 4, "quick")


@pytest.mark.parametrize("depth", [70, 250, 320])
def test_what_no_record_could_hold_is_refused(tmp_path, depth):
    """Pydantic writes 255 levels and reads 200 back: such a record would be lost."""
    nested = "[" * depth + "]" * depth
    for text in (f"base: {{a: {nested}}}", f"workload: {{a: {nested}}}", f"axes: {{a: {nested}}}"):
        path = tmp_path / "s.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError, match="is nested too deeply"):
            load_space(path)
    with pytest.raises(ConfigError, match="is nested too deeply"):
        combine(SweepSpace(), {"axes": parse_axes([f"a={nested}"])})
