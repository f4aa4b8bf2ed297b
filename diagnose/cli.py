"""The `fsdpdiag` command: options in, exit code out. Everything heavy is imported on use.

Exit codes: 0 fine; 1 an input cannot be read; 2 usage; 4 a problem was found; 6 could not decide;
130 stopped by Ctrl-C.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from fsdpbench.bench.arguments import parse_path, parse_text
from fsdpbench.bench.entry_point import run_command

if TYPE_CHECKING:
    from rich.console import Console

    from fsdpbench.bench.records import Verdict
    from fsdpbench.diagnose.findings import CheckReport, Finding
    from fsdpbench.diagnose.trials import TrialVerdict

COLUMNS = ("where", "found", "allowed", "remedy")
NARROW_COLUMNS = 60  # below it, findings are written as blocks instead of a table

app = typer.Typer(
    name="fsdpdiag",
    help="Check a configuration before a run, and explain a run that failed.",
    epilog="Exit codes: 0 fine, 1 an input cannot be read, 2 usage, 4 a problem was found, "
    "6 could not decide, 130 stopped by Ctrl-C. Under --json errors are JSON too.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def check(
    config: Annotated[
        Path,
        typer.Argument(
            help="YAML file: an engine configuration, a run or a sweep.",
            metavar="CONFIG",
            parser=parse_path,
        ),
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
            parser=parse_text,
            help="Log files of one run, a run or trial folder, any folder of logs, or - for stdin.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Name the first cause of a failure, the rank, the phase and what to do."""
    from fsdpbench.diagnose.explain import explain_sources
    from fsdpbench.diagnose.findings import exit_code_of, verdict_as_json

    verdict, trials = explain_sources(source, sys.stdin.buffer if sys.stdin else None)
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
    console = _console()
    world = "" if report.world_size is None else f", {report.world_size} ranks"
    console.print(f"{report.config} ({report.kind}{world})", markup=False, soft_wrap=True)
    if report.findings and console.width < NARROW_COLUMNS:
        _show_blocks(report.findings, console)
    elif report.findings:
        _show_table(report.findings, console)
    endings = {0: "fine", 4: "problems found", 6: "could not decide everything"}
    console.print(endings[int(report.exit_code)])


def _show_table(findings: Sequence[Finding], console: Console) -> None:
    from rich.table import Table

    table = Table(show_lines=True)
    for heading in ("", *COLUMNS):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row(finding.severity, *(_plain(getattr(finding, name)) for name in COLUMNS))
    console.print(table)


def _show_blocks(findings: Sequence[Finding], console: Console) -> None:
    """Write one finding a block: columns would be a few letters wide."""
    for finding in findings:
        console.print(finding.severity)
        for name in COLUMNS:
            if getattr(finding, name):
                console.print(f"  {name}: {_plain(getattr(finding, name))}")


def _plain(text: str) -> str:
    """Return a foreign text without markup and what a terminal would obey."""
    from rich.markup import escape

    from fsdpbench.bench.plain_text import clean_text

    return escape(clean_text(text))


def _show_verdict(verdict: Verdict, trials: list[TrialVerdict]) -> None:
    from fsdpbench.bench.plain_text import clean_text

    console = _console()

    def say(text: str) -> None:
        console.print(clean_text(text), markup=False, soft_wrap=True)

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


def main() -> NoReturn:
    """Entry point."""
    run_command(app, "fsdpdiag")


if __name__ == "__main__":
    main()
