"""Parsers of command-line values: an empty one is a usage error that names its option.

An unset shell variable (`--out "$RUN"`) makes one, and an empty path would mean the working folder.
"""

from __future__ import annotations

from pathlib import Path

import typer


def parse_text(value: str) -> str:
    """Return the value; a usage error if it is empty."""
    if "\0" in value:
        raise typer.BadParameter("holds a NUL byte.")
    if not value.strip():
        message = "is empty (an unset shell variable?). Give a value, or leave it out."
        raise typer.BadParameter(message)
    return value


def parse_path(value: str | Path) -> Path:
    """Return the value as a path; a usage error if it is empty."""
    return Path(parse_text(str(value)))
