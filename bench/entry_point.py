"""Runs a command of ours from its first to its last byte: what both commands do at their edges.

The user's errors become sentences on standard error and, under `--json`, one object on standard
output as well: {"error": [{"where", "what", "allowed", "remedy"}, ...], "exit_code"}. Nobody sees
a traceback for a wrong input, a full disk, a closed pipe or Ctrl-C.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer

from fsdpbench.bench.stop import (
    EXIT_INTERRUPTED,
    Interrupted,
    end_on_signals,
    interrupt_on_signals,
)
from fsdpbench.bench.streams import flush_streams, guard_streams
from fsdpbench.errors import FsdpbenchError, Violation, ViolationError

EXIT_USER_ERROR = 1
NARROW_COLUMNS = 50  # on a narrower terminal the help's boxes leave no room for words

UsageError: Any = typer.BadParameter.__bases__[0]
"""click's, or the copy of it that newer releases of typer carry."""


def run_command(app: typer.Typer, name: str) -> NoReturn:
    """Run the command and end the process with its exit code."""
    guard_streams()
    interrupt_on_signals()
    if shutil.get_terminal_size().columns < NARROW_COLUMNS:
        app.rich_markup_mode = None
    code = run_app(app, name, sys.argv[1:])
    end_on_signals()
    try:
        flush_streams()
    except OSError as error:
        if code != EXIT_USER_ERROR:  # else that has been said
            _say(f"{name}: standard output: {error.strerror or error}")
            code = code or EXIT_USER_ERROR
    sys.exit(code)


def wants_json(arguments: Sequence[str]) -> bool:
    """Say whether `--json` is among the options, before they have been parsed."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in options


def run_app(app: typer.Typer, name: str, arguments: Sequence[str]) -> int:
    """Run the command, say what stopped it, and return the exit code."""
    as_json = wants_json(arguments)
    try:
        code = app(list(arguments), prog_name=name, standalone_mode=not as_json)
    except SystemExit as end:
        code = end.code
    except UsageError as error:  # under --json only: otherwise typer shows it itself
        what = getattr(error, "message", "") or error.format_message()
        violation = Violation(_name_parameter(error), str(what))
        return _fail(name, [violation], error.exit_code, as_json)
    except ViolationError as error:
        return _fail(name, error.violations, EXIT_USER_ERROR, as_json)
    except FsdpbenchError as error:
        return _fail(name, [Violation("", str(error))], EXIT_USER_ERROR, as_json)
    except OSError as error:
        place = "" if error.filename is None else os.fsdecode(error.filename)
        return _fail(
            name, [Violation(place, error.strerror or str(error))], EXIT_USER_ERROR, as_json
        )
    except Interrupted:
        what = "stopped; what was measured so far is kept"
        return _fail(name, [Violation("", what)], EXIT_INTERRUPTED, as_json)
    return code if isinstance(code, int) else 0


def _name_parameter(error: Any) -> str:
    """Return the name of the option or argument that a usage error is about, if it is about one."""
    parameter = getattr(error, "param", None)
    if parameter is None:
        return str(getattr(error, "option_name", "") or "")
    options = [option for option in parameter.opts if option.startswith("-")]
    return str(options[-1] if options else parameter.metavar or parameter.name)


def _fail(name: str, violations: Sequence[Violation], code: int, as_json: bool) -> int:
    """Say on standard error, and as JSON if that was asked for, what is wrong; return the code."""
    end_on_signals()  # a second Ctrl-C ends it here
    _say("\n".join(f"{name}: {_describe(violation)}" for violation in violations))
    if as_json:
        listed = [
            {"where": v.where, "what": v.found, "allowed": v.allowed, "remedy": v.remedy}
            for v in violations
        ]
        print(json.dumps({"error": listed, "exit_code": code}, indent=1))
    return code


def _describe(violation: Violation) -> str:
    if violation.where and not violation.allowed:
        return f"{violation.where}: {violation.found}"
    return str(violation) if violation.where else violation.found


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk behind `2>`: the exit code must do
        print(text, file=sys.stderr, flush=True)
