import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from fsdpbench.bench import environment
from fsdpbench.bench.environment import Gpu, describe_environment, list_gpus, read_revision

GPUS = [Gpu(name, 1) for name in "ABCD"]


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, "ABCD"),
        ("", ""),
        ("-1", ""),
        ("2", "C"),
        ("3,0", "DA"),
        ("0, 1", "AB"),
        ("1,9,0", "B"),
        ("GPU-0123,GPU-4567", "AA"),
        ("none", ""),
    ],
)
def test_visible_gpus_are_those_of_cuda(visible, names):
    assert "".join(gpu.name for gpu in environment._keep_visible(GPUS, visible)) == names


def test_the_facts_are_json_and_name_nobody():
    facts = describe_environment()
    text = json.dumps(facts, allow_nan=False)
    assert {"python", "cpu", "cpu_count", "memory_bytes", "gpus", "torch", "machine"} <= set(facts)
    assert facts["torch"].count(".") >= 2
    assert platform.node() not in text
    assert facts == describe_environment()
    assert facts["gpus"] == [gpu.name for gpu in list_gpus()[0]]


def git(folder, *arguments):
    identity = ["-c", "user.name=x", "-c", "user.email=x@x"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True)


def test_the_revision_says_whether_the_code_is_committed(tmp_path, monkeypatch):
    package = tmp_path / "fsdpbench"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(environment.fsdpbench, "__file__", str(package / "__init__.py"))
    assert read_revision() == environment.Revision(None, None), "no repository"
    git(tmp_path, "init", "-q")
    (tmp_path / "other").write_text("")
    git(tmp_path, "add", "other")
    git(tmp_path, "commit", "-qm", "x")
    assert read_revision() == environment.Revision(None, None), "somebody else's repository"
    git(tmp_path, "add", "fsdpbench")
    git(tmp_path, "commit", "-qm", "x")
    revision = read_revision()
    assert len(revision.commit) == 40
    assert revision.dirty is False
    (package / "__init__.py").write_text("changed = 1\n")
    assert read_revision() == environment.Revision(revision.commit, True)


def test_no_torch_is_needed():
    code = (
        "import sys; from fsdpbench.bench.environment import describe_environment as d; d();"
        "sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
