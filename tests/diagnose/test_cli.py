import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdpbench.bench.entry_point import run_app
from fsdpbench.diagnose.cli import app

SAMPLES = Path(__file__).parent / "samples"


def fsdpdiag(*arguments, stdin=b""):
    command = [sys.executable, "-m", "fsdpbench.diagnose.cli", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["explain", SAMPLES / "healthy-steps.log"], 0),
        (["explain", SAMPLES / "mesh-world-size.log"], 4),
        (["explain", SAMPLES / "view-unknown.log"], 6),
        (["explain", SAMPLES / "missing.log"], 1),
        (["explain"], 2),
        (["check", "missing.yaml"], 1),
        (["check", "--world-size", "0", "x.yaml"], 2),
        (["nonsense"], 2),
        (["--help"], 0),
    ],
)
def test_exit_codes(arguments, code):
    result = fsdpdiag(*arguments)
    assert result.returncode == code
    assert b"Traceback" not in result.stderr


def test_explain_json_from_standard_input():
    result = fsdpdiag(
        "explain", "--json", "-", stdin=b"OSError: [Errno 28] No space left on device\n"
    )
    answer = json.loads(result.stdout)
    assert answer["class"] == "storage"
    assert answer["evidence"][0] == {
        "file": "-",
        "line": 1,
        "text": "OSError: [Errno 28] No space left on device",
    }


def test_explain_says_rank_remedy_and_evidence():
    text = fsdpdiag("explain", SAMPLES / "rank-killed.log").stdout.decode()
    assert text.startswith("rank_death: rank 1 was killed by SIGKILL")
    assert "1. check dmesg" in text
    assert "rank-killed.log:" in text


def test_empty_and_binary_files(tmp_path):
    empty, noise = tmp_path / "empty.log", tmp_path / "noise.bin"
    empty.touch()
    noise.write_bytes(bytes(range(256)) * 400)
    assert fsdpdiag("explain", empty).returncode == 6
    assert fsdpdiag("explain", noise).returncode == 6


def test_check_reports_all_violations(tmp_path):
    config = tmp_path / "bad.yaml"
    config.write_text('path: tiny-qwen3\nbackend: "fsdp:d2t3"\noptimizr: {}\n')
    result = fsdpdiag("check", config, "--world-size", "4", "--json")
    assert result.returncode == 4
    answer = json.loads(result.stdout)
    places = {finding["where"] for finding in answer["findings"]}
    assert {"optimizr", "backend", "tensor_parallel_size"} <= places
    table = fsdpdiag("check", config, "--world-size", "4").stdout.decode()
    assert "optimizr" in table
    assert "problems found" in table


@pytest.mark.parametrize(
    ("arguments", "code", "where"),
    [
        (["check", ""], 2, "CONFIG"),
        (["explain", ""], 2, "LOG|RUN_DIR|-"),
        (["explain", "a.log", " "], 2, "LOG|RUN_DIR|-"),
        (["check", "none.yaml"], 1, "none.yaml"),
        (["check", "deep.yaml"], 1, "deep.yaml"),
        (["check", "binary.yaml"], 1, "binary.yaml"),
        (["check", "list.yaml"], 1, "list.yaml:1"),
        (["explain", "none.log"], 1, "none.log"),
        (["explain", "."], 1, "."),
        (["explain", "secret.log"], 1, "secret.log"),
    ],
)
def test_errors_are_json(tmp_path, monkeypatch, capsys, arguments, code, where):
    if where == "secret.log" and os.geteuid() == 0:
        pytest.skip("root may read everything")
    monkeypatch.chdir(tmp_path)
    Path("deep.yaml").write_text("a: " + "[" * 5000)
    Path("binary.yaml").write_bytes(b"\xff\xfe\0")
    Path("list.yaml").write_text("[1]")
    if where == "secret.log":
        Path("secret.log").touch(mode=0)
    assert run_app(app, "fsdpdiag", [*arguments, "--json"]) == code
    answer = json.loads(capsys.readouterr().out)
    assert answer["exit_code"] == code
    assert [error["where"] for error in answer["error"]] == [where]


def test_findings_are_readable_on_a_narrow_terminal(tmp_path, monkeypatch, capsys):
    config = tmp_path / "bad.yaml"
    config.write_text('path: tiny-qwen3\nbackend: "fsdp:d2t3"\n"a[b]": {}\n')
    for columns in ("20", "40", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        assert run_app(app, "fsdpdiag", ["check", str(config)]) == 4
        shown = capsys.readouterr().out
        assert "tensor_parallel" in shown, "words are not cut into columns of letters"
        assert "a[b]" in shown
        assert "\x1b" not in shown


def test_a_closed_pipe_changes_no_exit_code():
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "fsdpbench.diagnose.cli", "explain"]
    done = subprocess.run(
        [*command, SAMPLES / "mesh-world-size.log"],
        stdout=write_end,
        stderr=subprocess.PIPE,
        timeout=60,
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (4, b"")


def test_check_passes_a_good_config(tmp_path):
    config = tmp_path / "good.yaml"
    config.write_text('path: tiny-qwen3\nbackend: "fsdp:d2t2"\noptimizer: {type: adam}\n')
    assert fsdpdiag("check", config, "--world-size", "4").returncode == 0


def test_help_is_quick_and_torch_free():
    code = (
        "import sys; from fsdpbench.diagnose import cli; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'pandas', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    best = min(_time_help() for _ in range(3))
    assert best < 1.5  # 0.3 s on an idle machine; the test machine may be busy


def _time_help():
    started = time.perf_counter()
    fsdpdiag("--help")
    return time.perf_counter() - started
