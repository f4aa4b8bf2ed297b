"""YAML files and overrides: right values, and errors that say where."""

from __future__ import annotations

import pytest

from fsdpbench.engine.config.load import apply_overrides, build_config, load_config, load_yaml
from fsdpbench.engine.config.run import SFTRun
from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def write_text(text):
        file = tmp_path / "run.yaml"
        file.write_text(text, encoding="utf-8")
        return file

    return write_text


def message_of(build):
    with pytest.raises(ConfigError) as caught:
        build()
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("-2.5e-3", -2.5e-3),
        (".5", 0.5),
        ("3.", 3.0),
        ("7", 7),
        ("-7", -7),
        ("0", 0),
        ("010", "010"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("0x1F", "0x1F"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("False", False),
        ("yes", "yes"),
        ("on", "on"),
        ("null", None),
        ("~", None),
        ("", None),
        ("fsdp:d4c2t1", "fsdp:d4c2t1"),
        ("'7'", "7"),
        ("[1, 2.0, x]", [1, 2.0, "x"]),
        ("{a: 1}", {"a": 1}),
    ],
)
def test_scalars(write, text, value):
    loaded = load_yaml(write(f"key: {text}\n"))["key"]
    assert loaded == value
    assert type(loaded) is type(value)


def test_anchors_and_merges(write):
    file = write("base: &base {lr: 1e-4, type: sgd}\nother: {<<: *base, lr: 1}\n")
    assert load_yaml(file)["other"] == {"lr": 1, "type": "sgd"}


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "null\n", "{}\n"])
def test_an_empty_file_is_an_empty_mapping(write, text):
    assert load_yaml(write(text)) == {}
    assert load_config(write(text)) == TrainEngineConfig()


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("a: 1\nb: [1\nc: 2\n", ":3:2", "no valid YAML"),
        ("a: 1\na: 2\n", ":2:1", "'a' is given twice"),
        ("a:\n  b: 1\n  b: 1\n", ":3:3", "'b' is given twice"),
        ("- 1\n", ":1", "must be a mapping"),
        ("text\n", ":1", "must be a mapping"),
        ("a: !thing 1\n", ":1:4", "tag"),
        ("? [1]\n: 2\n", ":1:3", "unhashable"),
        ("a: &a [*a]\n", ":1:4", "contains itself"),
        ("a: &a {b: *a}\n", ":1:4", "contains itself"),
        ("a: *b\n", ":1:4", "undefined alias"),
        ("a: 1\n---\nb: 2\n", ":2:1", "another document"),
        ("a: \x07\n", "", "not allowed"),
        ("a: {<<: 3}\n", ":1:9", "mapping"),
        ("[" * 10_000, "", "nested too deeply"),
    ],
)
def test_bad_yaml_names_line_and_column(write, text, place, words):
    file = write(text)
    message = message_of(lambda: load_config(file))
    assert message.startswith(f"{file}{place}")
    assert words in message


def test_unreadable_files(tmp_path):
    assert "cannot be read" in message_of(lambda: load_yaml(tmp_path / "none.yaml"))
    assert "cannot be read" in message_of(lambda: load_yaml(tmp_path))
    (tmp_path / "latin.yaml").write_bytes(b"path: \xff\xfe\n")
    assert "cannot be read" in message_of(lambda: load_yaml(tmp_path / "latin.yaml"))


def test_overrides_are_typed_and_leave_the_original():
    data = {"optimizer": {"lr": 1}, "seed": 3}
    changed = apply_overrides(
        data,
        [
            "optimizer.lr=1e-4",
            "fsdp.offload_params=true",
            "backend=fsdp:d2",
            "target_modules=[q_proj, v_proj]",
            "mb_spec.max_tokens_per_mb=null",
            "path='7'",
            "attn_impl=a=b",
        ],
    )
    assert data == {"optimizer": {"lr": 1}, "seed": 3}
    assert changed == {
        "optimizer": {"lr": 1e-4},
        "seed": 3,
        "fsdp": {"offload_params": True},
        "backend": "fsdp:d2",
        "target_modules": ["q_proj", "v_proj"],
        "mb_spec": {"max_tokens_per_mb": None},
        "path": "7",
        "attn_impl": "a=b",
    }
    assert apply_overrides({"a": None}, ["a.b=1", "a.c=2"]) == {"a": {"b": 1, "c": 2}}


def test_bad_overrides_are_reported_together():
    overrides = ["seed", "=1", "a..b=1", "path=", "seed.x=1", "seed=[1", "seed={a: 1, a: 2}"]
    message = message_of(lambda: apply_overrides({"seed": 1}, overrides))
    assert len(message.splitlines()) >= len(overrides)
    assert "override='seed': must read dotted.path=value" in message
    assert "path: has no value in the override; write null, or '' for no text" in message
    assert "seed.x=1: seed holds no fields" in message
    assert "given twice" in message


def test_load_config_reads_a_bare_engine(write):
    file = write("path: tiny-qwen3\noptimizer:\n  lr: 1e-4\n")
    config = load_config(file, ["optimizer.type=sgd", "backend=fsdp:d2"])
    assert config == TrainEngineConfig(
        path="tiny-qwen3", optimizer={"type": "sgd", "lr": 1e-4}, backend="fsdp:d2"
    )


def test_violations_name_their_line_or_override(write):
    file = write("path: x\noptimizer:\n  lr: 1\n  typ: adam\nfsdp:\n  offload_params: yes\nq: 1\n")
    message = message_of(lambda: load_config(file, ["optimizer.lr=-1", "dtype=float16"]))
    lines = {line.partition("=")[0].partition(":")[0]: line for line in message.splitlines()}
    assert f"({file}:4)" in lines["optimizer.typ"]
    assert f"({file}:6)" in lines["fsdp.offload_params"]
    assert f"({file}:7)" in lines["q"]
    assert "(override 'optimizer.lr=-1')" in lines["optimizer.lr"]


def test_a_missing_field_names_its_section(write):
    file = write("kind: sft\n\nactor: {optimizer: {}}\ndataset:\n  pth: x\n")
    message = message_of(lambda: load_config(file))
    assert f"dataset.path: is required ({file}:4)" in message


def test_kind_decides_what_is_built(write):
    file = write("kind: sft\nactor: {path: tiny-qwen3, optimizer: {}}\ndataset: {path: x}\n")
    assert isinstance(load_config(file), SFTRun)
    assert isinstance(build_config({"path": "x"}), TrainEngineConfig)
    message = message_of(lambda: load_config(write("kind: sfd\n")))
    assert "did you mean 'sft'?" in message


def test_a_sweep_names_its_readers(write):
    assert "fsdpbench sweep" in message_of(lambda: load_config(write("kind: sweep\n")))
