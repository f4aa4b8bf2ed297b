"""`fsdpbench report RUN`: reads a run directory, writes its report files, prints the ranking.

Errors of the user's input are raised; the command's entry point turns them into exit code 1.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from fsdpbench.bench.folders import write_atomically
from fsdpbench.errors import ConfigError, Violation
from fsdpbench.reports.failures import count_statuses
from fsdpbench.reports.html import render_html
from fsdpbench.reports.markdown import render_markdown
from fsdpbench.reports.ranking import rank_records
from fsdpbench.reports.run import Run, load_run
from fsdpbench.reports.terminal import print_ranking


@dataclass(frozen=True)
class ReportFiles:
    """Where the two reports of a run were written."""

    html: Path
    markdown: Path


def write_reports(run: Run, out: Path | None = None) -> ReportFiles:
    """Write `report.html` and `report.md` into `out`, by default into the run directory."""
    folder = run.folder.path if out is None else out
    files = ReportFiles(folder / "report.html", folder / "report.md")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(files.html, render_html(run))
        write_atomically(files.markdown, render_markdown(run))
    except OSError as error:
        remedy = "make room, or give a writable folder with --out"
        found = error.strerror or type(error).__name__
        raise ConfigError([Violation(str(folder), found, "", remedy)]) from error
    return files


def report(run: Path, out: Path | None = None, as_json: bool = False) -> None:
    """Write the report files of a run directory, then print the ranking, or JSON about both."""
    loaded = load_run(run)
    files = write_reports(loaded, out)
    if as_json:
        typer.echo(json.dumps(summarize_run(loaded, files)))
        return
    console = Console()
    print_ranking(loaded.records, console)
    for path in (files.html, files.markdown):
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)


def summarize_run(run: Run, files: ReportFiles) -> dict[str, Any]:
    """Return what `--json` prints: the files, the counts, the ids in ranking order, problems."""
    ranked = rank_records(run.records)
    return {
        "html": str(files.html),
        "markdown": str(files.markdown),
        "counts": dict(count_statuses(run.records)),
        "ranking": [
            {
                "id": record.id,
                "status": record.status.value,
                "axes": record.axes,
                "tokens_per_second": record.tokens_per_second,
                "sync_pause_seconds": None if record.sync is None else record.sync.pause_seconds,
            }
            for record in ranked
        ],
        "problems": list(run.problems),
    }
