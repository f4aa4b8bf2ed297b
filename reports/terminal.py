"""The ranking on a terminal, at any width: as many columns as fit, then one trial a block.

Values are put in as text, never as markup; columns leave in the order of their priority.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from fsdpbench.bench.plain_text import clean_text
from fsdpbench.bench.records import Record
from fsdpbench.reports.failures import FailureGroup, build_failures, build_not_started
from fsdpbench.reports.ranking import build_ranking
from fsdpbench.reports.tables import ABSENT, Cell, Column, Row, Table, shorten

MAX_ROWS = 30
TONES = {"good": "green", "bad": "red", "warn": "yellow", "quiet": "dim", "": ""}


def print_ranking(records: Sequence[Record], console: Console) -> None:
    """Print the ranking, what failed and what was not started, within the console's width."""
    ranking = build_ranking(records)
    shown = Table(
        ranking.title, ranking.caption, ranking.columns, ranking.rows[:MAX_ROWS], ranking.notes
    )
    console.print(_text(ranking.caption, style="bold"))
    if shown.rows:
        _print_table(shown, console)
    if len(ranking.rows) > MAX_ROWS:
        hidden = len(ranking.rows) - MAX_ROWS
        console.print(_text(f"{hidden} more trials are in the report.", style="dim"))
    for note in ranking.notes:
        console.print(_text(note, style="dim"))
    for group in build_failures(records):
        _print_failure(group, console)
    not_started = build_not_started(records)
    if not_started.rows:
        console.print(_text(f"{not_started.caption} The report says why for each.", style="dim"))


def _print_table(table: Table, console: Console) -> None:
    fitted, left_out = fit_columns(table, console)
    if fitted is None:
        for row in table.rows:
            _print_block(table.columns, row, console)
        return
    console.print(_rich_table(fitted))
    if left_out:
        names = ", ".join(left_out)
        console.print(_text(f"Too narrow for: {names}.", style="dim"))


def fit_columns(table: Table, console: Console) -> tuple[Table | None, list[str]]:
    """Drop columns by priority until the table fits; None when not even the needed ones do."""
    left_out: list[Column] = []
    wide = console.options.update(max_width=10_000)  # a measurement is capped at the width asked
    while True:
        needed = Measurement.get(console, wide, _rich_table(table)).maximum
        if needed <= console.width:
            return table, [column.title for column in left_out]
        droppable = [column for column in table.columns if column.priority]
        if not droppable:
            return None, []
        last = max(droppable, key=lambda column: column.priority)
        left_out.append(last)
        table = table.without([last.key])


def _rich_table(table: Table) -> RichTable:
    rich_table = RichTable(box=None, pad_edge=False, header_style="bold")
    for column in table.columns:
        rich_table.add_column(
            _text(fold_title(column.title)),
            justify="right" if column.numeric else "left",
            vertical="bottom",
            no_wrap=True,
        )
    for row in table.rows:
        rich_table.add_row(*(_cell_text(cell) for cell in row.cells))
    return rich_table


def fold_title(title: str, width: int = 12) -> str:
    """Break a long title after its underscores, dots, slashes and spaces into short lines."""
    lines = [""]
    for word in re.findall(r"[^_./ ]+[_./ ]?|[_./ ]", title):
        if lines[-1] and len(lines[-1]) + len(word.rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return "\n".join(line.rstrip() for line in lines)


def _cell_text(cell: Cell) -> Text:
    return _text(shorten(cell.text, 40), style=TONES.get(cell.tone, ""))


def _print_block(columns: Sequence[Column], row: Row, console: Console) -> None:
    for column, cell in zip(columns, row.cells, strict=True):
        if cell.text == ABSENT:
            continue
        line = _text(f"{column.title}: ", style="dim")
        line.append_text(_cell_text(cell))
        console.print(line)
    console.print()


def _print_failure(group: FailureGroup, console: Console) -> None:
    count = f"{len(group.trials)} trial" + ("s" if len(group.trials) > 1 else "")
    head = _text(f"{group.status}", style="bold red")
    head.append_text(_text(f" ({count}, {group.failure_class}): "))
    head.append_text(_text(shorten(group.cause, 300)))
    console.print(head)
    if group.remedies:
        console.print(_text(f"  to do: {group.remedies[0]}"))
    first = group.trials[0]
    console.print(_text(f"  {first.label}, logs in {first.logs}", style="dim"))


def _text(text: str, style: str = "") -> Text:
    """Return a foreign text as plain text, without what a terminal would obey."""
    return Text(clean_text(text), style=style)
