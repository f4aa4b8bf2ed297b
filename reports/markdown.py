"""The Markdown report: the ranking, failures and facts as text that a pull request can quote.

Every value is escaped, so that neither a pipe nor HTML in a log line can change the document.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from fsdpbench.bench.plain_text import clean_text
from fsdpbench.reports.facts import (
    Fact,
    build_commands,
    build_environment,
    build_headlines,
    build_measurement,
)
from fsdpbench.reports.failures import FailureGroup, build_failures, build_not_started
from fsdpbench.reports.ranking import build_ranking
from fsdpbench.reports.run import Run
from fsdpbench.reports.tables import Cell, Table, shorten

MAX_EVIDENCE = 5
MAX_TRIALS = 10

_SPECIAL = re.compile(r"([\\`*\[\]<>|#~]|(?<![^\W_])_|_(?![^\W_]))")  # `a_b` needs no escape


def render_markdown(run: Run) -> str:
    """Render the report of a run as GitHub-flavoured Markdown."""
    return "\n".join(_lines(run)) + "\n"


def escape(text: str) -> str:
    """Escape a text for use in a paragraph or a table cell, on one line."""
    one_line = " ".join(clean_text(text).split()).replace("&", "&amp;")
    return _SPECIAL.sub(r"\\\1", one_line)


def _lines(run: Run) -> Iterator[str]:
    yield f"# fsdpbench report: {escape(run.name)}"
    yield ""
    for problem in run.problems:
        yield f"> Not read: {escape(problem)}"
    if run.problems:
        yield ""
    for headline in build_headlines(run.records):
        detail = f" ({escape(headline.detail)})" if headline.detail else ""
        yield f"- **{escape(headline.name)}:** {escape(headline.figure)}{detail}"
    yield ""
    yield from _table_section(build_ranking(run.records))
    failures = build_failures(run.records)
    if failures:
        yield "## Failures"
        yield ""
        for group in failures:
            yield from _failure_lines(group)
    not_started = build_not_started(run.records)
    if not_started.rows:
        yield from _table_section(not_started)
    for title, facts in (
        ("Commands", build_commands(run.records, run.sweep)),
        ("Measurement", build_measurement(run.records)),
        ("Environment", build_environment(run.records)),
    ):
        yield from _fact_lines(title, facts)


def _table_section(table: Table) -> Iterator[str]:
    yield f"## {escape(table.title)}"
    yield ""
    yield escape(table.caption)
    yield ""
    if table.rows:
        yield "| " + " | ".join(escape(column.title) for column in table.columns) + " |"
        yield "|" + "|".join("---:" if column.numeric else "---" for column in table.columns) + "|"
        for row in table.rows:
            yield "| " + " | ".join(map(_cell_text, row.cells)) + " |"
        yield ""
    for note in table.notes:
        yield escape(note)
        yield ""


def _cell_text(cell: Cell) -> str:
    return escape(f"{cell.text} ({cell.detail})" if cell.detail else cell.text)


def _failure_lines(group: FailureGroup) -> Iterator[str]:
    yield f"### {escape(group.status)}: {escape(shorten(group.cause, 300))}"
    yield ""
    where = f", first at {escape(group.where)}" if group.where else ""
    confidence = f", confidence {group.confidence}" if group.confidence else ""
    yield f"Class **{escape(group.failure_class)}**{where}{confidence}."
    yield ""
    for reason in group.reasons[:3]:
        yield f"- Seen: {escape(shorten(reason, 300))}"
    for remedy in group.remedies:
        yield f"- Remedy: {escape(remedy)}"
    for line in group.evidence[:MAX_EVIDENCE]:
        yield f"- {escape(f'{line.file}:{line.line}')}: {escape(shorten(line.text, 300))}"
    for trial in group.trials[:MAX_TRIALS]:
        ended = f" ({escape(trial.ended)})" if trial.ended else ""
        yield f"- Trial: {escape(trial.label)}{ended}, logs in {escape(trial.logs)}"
    if len(group.trials) > MAX_TRIALS:
        yield f"- and {len(group.trials) - MAX_TRIALS} more trials"
    yield ""


def _fact_lines(title: str, facts: Sequence[Fact]) -> Iterator[str]:
    if not facts:
        return
    yield f"## {title}"
    yield ""
    for fact in facts:
        yield f"- {escape(fact.name)}: {escape(fact.value)}"
    yield ""
