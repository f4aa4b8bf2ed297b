"""The `fsdpdiag` command: options in, exit code out. Everything heavy is imported on use.

Exit codes: 0 fine; 1 an input cannot be read; 2 usage; 4 a problem was found; 6 could not decide.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsdpbench.errors import FsdpbenchError

if TYPE_CHECKING:
    from rich.console import Console

    from fsdpbench.bench.records import Verdict
    from fsdpbench.diagnose.findings import CheckReport
    from fsdpbench.diagnose.trials import TrialVerdict

EXIT_USER_ERROR = 1

app = typer.Typer(
    name="fsdpdiag",
    help="Check a configuration before a run, and explain a run that failed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def check(
    config: Annotated[
        Path, typer.Argument(help="YAML file: an engine configuration, a run or a sweep.")
    ],
    world_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of ranks; default: the backend's degrees, or one per GPU.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check a configuration against its rules, the world size, the model and this machine."""
    from fsdpbench.diagnose.checks.machine import read_machine
    from fsdpbench.diagnose.checks.static import check_config

    report = check_config(config, world_size, read_machine())
    if as_json:
        _print_json(report.as_json())
    else:
        _show_report(report)
    raise typer.Exit(int(report.exit_code))


@app.command()
def explain(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="LOG|RUN_DIR|-",
            help="Log files of one run, a run or trial folder, any folder of logs, or - for stdin.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Name the first cause of a failure, the rank, the phase and what to do."""
    from fsdpbench.diagnose.explain import explain_sources
    from fsdpbench.diagnose.findings import exit_code_of, verdict_as_json

    verdict, trials = explain_sources(source, sys.stdin.buffer)
    if as_json:
        _print_json(verdict_as_json(verdict, trials))
    else:
        _show_verdict(verdict, trials)
    raise typer.Exit(int(exit_code_of(verdict)))


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, indent=1, ensure_ascii=True))


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _show_report(report: CheckReport) -> None:
    from rich.table import Table

    console = _console()
    world = "" if report.world_size is None else f", {report.world_size} ranks"
    console.print(f"{report.config} ({report.kind}{world})", markup=False, soft_wrap=True)
    if report.findings:
        table = Table(show_lines=True)
        for heading in ("", "where", "found", "allowed", "remedy"):
            table.add_column(heading, overflow="fold")
        for finding in report.findings:
            cells = (
                finding.severity,
                finding.where,
                finding.found,
                finding.allowed,
                finding.remedy,
            )
            table.add_row(*(_plain(cell) for cell in cells))
        console.print(table)
    endings = {0: "fine", 4: "problems found", 6: "could not decide everything"}
    console.print(endings[int(report.exit_code)])


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(str(text))


def _show_verdict(verdict: Verdict, trials: list[TrialVerdict]) -> None:
    console = _console()

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    say(f"{verdict.failure_class}: {verdict.cause}")
    known = {"rank": verdict.root_rank, "phase": verdict.phase, "rule": verdict.rule}
    details = [f"{name} {value}" for name, value in known.items() if value is not None]
    say(f"  {', '.join([*details, f'confidence {verdict.confidence:.2f}'])}")
    for number, remedy in enumerate(verdict.remedies, start=1):
        say(f"  {number}. {remedy}")
    for evidence in verdict.evidence:
        say(f"  {evidence.file}:{evidence.line}: {evidence.text}")
    for trial in trials:
        ending = f"{trial.verdict.failure_class}: {trial.verdict.cause}" if trial.verdict else ""
        say(f"trial {trial.id} {trial.status} {ending}".rstrip())


def main() -> None:
    """Run the command; a user's mistake is one message, not a traceback."""
    try:
        app()
    except FsdpbenchError as error:
        typer.echo(f"fsdpdiag: {error}", err=True)
        raise SystemExit(EXIT_USER_ERROR) from None
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        typer.echo(f"fsdpdiag: {name}{error.strerror or error}", err=True)
        raise SystemExit(EXIT_USER_ERROR) from None


if __name__ == "__main__":
    main()
