"""What both commands do at their edges, on a small command that fails in every way there is."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
import typer

from fsdpbench.bench.arguments import parse_text
from fsdpbench.bench.entry_point import run_app, run_command, wants_json
from fsdpbench.bench.stop import Interrupted
from fsdpbench.errors import ConfigError, FsdpbenchError, Violation

ROOT = Path(__file__).parents[2]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def act(
    kind: Annotated[str, typer.Argument(metavar="KIND", parser=parse_text)],
    size: int = 1,
    as_json: Annotated[bool, typer.Option("--json")] = False,
):
    if kind == "config":
        raise ConfigError([Violation("a.b", "3", "must be 4", "write 4"), Violation("c", "x")])
    if kind == "plain":
        raise FsdpbenchError("lock: held")
    if kind == "file":
        open("/no/such/file")  # noqa: PTH123, SIM115
    if kind == "stop":
        raise Interrupted
    if kind == "lines":
        for _ in range(3000):
            print("some line", flush=True)
        print("all written", file=sys.stderr)
    if kind == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    raise typer.Exit(5)


def run(*arguments, **fields):
    return subprocess.run(
        [sys.executable, "-m", "tests.bench.test_entry_point", *arguments],
        cwd=ROOT,
        timeout=60,
        check=False,
        text=True,
        stderr=subprocess.PIPE,
        **fields,
    )


@pytest.mark.parametrize(
    ("arguments", "code", "errors"),
    [
        (["config"], 1, [("a.b", "3", "must be 4", "write 4"), ("c", "x", "", "")]),
        (["plain"], 1, [("", "lock: held", "", "")]),
        (["file"], 1, [("/no/such/file", "No such file or directory", "", "")]),
        ([""], 2, [("KIND", "is empty", "", "")]),
        (["x", "--size", "many"], 2, [("--size", "valid integer", "", "")]),
        (["x", "--nonsense"], 2, [("--nonsense", "No such option", "", "")]),
        ([], 2, [("KIND", "Missing argument", "", "")]),
        (["stop"], 130, [("", "stopped", "", "")]),
    ],
    ids=["config", "plain", "file", "empty", "value", "option", "missing", "stop"],
)
def test_errors_under_json_are_one_object(capsys, arguments, code, errors):
    assert run_app(app, "demo", [*arguments, "--json"]) == code
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert answer["exit_code"] == code
    assert [list(error) for error in answer["error"]] == [
        ["where", "what", "allowed", "remedy"] for _ in errors
    ]
    for found, expected in zip(answer["error"], errors, strict=True):
        assert all(part in text for text, part in zip(found.values(), expected, strict=True))
        assert found["what"] in said.err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["config"], 1, "demo: a.b=3: must be 4; write 4\ndemo: c: x\n"),
        (["x", "--size", ""], 2, "--size"),
        (["stop"], 130, "demo: stopped; what was measured so far is kept\n"),
        (["x"], 5, ""),
    ],
)
def test_without_json_standard_output_stays_empty(capsys, arguments, code, words):
    assert run_app(app, "demo", arguments) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err


def test_a_signal_at_any_moment_ends_with_130():
    done = run("SIGTERM")
    assert done.returncode == 130
    assert done.stderr == "demo: stopped; what was measured so far is kept\n"


def test_a_closed_pipe_changes_nothing():
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = run("lines", stdout=write_end)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (5, "all written\n")


def test_a_full_disk_behind_standard_output_is_said():
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = run("lines", stdout=full)
    assert (done.returncode, done.stderr) == (1, "demo: No space left on device\n")


def test_json_is_an_option_only():
    assert wants_json(["explain", "--json", "x"])
    assert not wants_json(["explain", "--", "--json"])


if __name__ == "__main__":
    run_command(app, "demo")
