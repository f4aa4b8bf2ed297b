import json
import os
from pathlib import Path

import pytest

from fsdpbench.bench.folders import RunFolder
from fsdpbench.bench.invocation import SweepOptions, choose_run_folder, resolve_space
from fsdpbench.errors import ConfigError


@pytest.fixture(autouse=True)
def _work_in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def begin_run(name, space, seconds=None):
    folder = RunFolder(Path("runs") / name)
    folder.path.mkdir(parents=True)
    folder.sweep_path.write_text(json.dumps({"space": space}))
    if seconds is not None:
        os.utime(folder.sweep_path, (seconds, seconds))
    return folder


def resolve(**options):
    return resolve_space(SweepOptions(**options), RunFolder(Path("runs/r")))


def test_options_become_a_space():
    space = resolve(axes=["seed=1,2"], preset="mesh", model="tiny-llama", timeout_seconds=5.0)
    assert space.axes == {"seed": [1, 2]}
    assert (space.preset, space.model, space.timeout_seconds) == ("mesh", "tiny-llama", 5.0)


def test_axes_replace_a_presets_and_join_a_files():
    Path("s.yaml").write_text("axes: {seed: [1], dtype: [float32]}\nworkload: {steps: 3}\n")
    space = resolve(space=Path("s.yaml"), axes=["seed=5"])
    assert space.axes == {"seed": [5], "dtype": ["float32"]}
    assert space.workload == {"steps": 3}


def test_paths_become_absolute_and_presets_stay_names():
    Path("model").mkdir()
    Path("tiny-qwen3").mkdir()
    Path("text.txt").write_text("hello")
    here = Path.cwd()
    space = resolve(model="model", data=Path("text.txt"), axes=["path=model,tiny-qwen3,org/hub"])
    assert space.model == str(here / "model")
    assert space.workload == {"data": str(here / "text.txt")}
    assert space.axes["path"] == [str(here / "model"), "tiny-qwen3", "org/hub"]
    assert resolve(model="tiny-qwen3").model == "tiny-qwen3"


def test_odd_paths_stay_as_they_are():
    axes = ["data='',~nobody-here/x.txt,3,null", "model='',~nobody-here/x,\"a\\0b\""]
    space = resolve(axes=axes)
    data, model = space.axes["data"], space.axes["model"]
    assert data == ["", str(Path.cwd() / "~nobody-here/x.txt"), 3, None]
    assert model == ["", "~nobody-here/x", "a\0b"]


def test_a_bare_resume_takes_the_space_that_was_begun():
    folder = begin_run("r", {"axes": {"seed": [3]}, "model": "tiny-llama"})
    options = SweepOptions(resume=True, timeout_seconds=9.0)
    space = resolve_space(options, folder)
    assert (space.axes, space.model, space.timeout_seconds) == ({"seed": [3]}, "tiny-llama", 9.0)
    named = resolve_space(SweepOptions(resume=True, axes=["seed=4"]), folder)
    assert (named.axes, named.model) == ({"seed": [4]}, "")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "[" * 100_000, "\x00", '{"space": {"axis": 1}}', '{"spaces": 1}']
)
def test_a_plan_that_cannot_be_read_is_named(content):
    folder = begin_run("r", {})
    folder.sweep_path.write_text(content)
    with pytest.raises(ConfigError, match="cannot be read as the plan of a sweep"):
        resolve_space(SweepOptions(resume=True), folder)


def test_run_folders():
    assert choose_run_folder(SweepOptions(out=Path("x"))).path == Path("x")
    first = choose_run_folder(SweepOptions(model="a/b c"))
    assert first.path.parent == Path("runs")
    assert first.path.name.endswith("-b-c")
    first.path.mkdir(parents=True)
    assert choose_run_folder(SweepOptions(model="a/b c")).path != first.path
    with pytest.raises(ConfigError, match="no sweep was begun in runs/"):
        choose_run_folder(SweepOptions(resume=True))
    begin_run("new", {}, 2000.0)
    begin_run("old", {}, 1000.0)
    assert choose_run_folder(SweepOptions(resume=True)).path == Path("runs/new")
    Path("file").write_text("")
    with pytest.raises(ConfigError, match="is not a folder"):
        choose_run_folder(SweepOptions(out=Path("file")))
