"""The guide map tells the truth: objects import, defaults stand as written, test files exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ISSUES = set("ABCDEFGHI")


def read_rows() -> list[tuple[str, str, str, str]]:
    rows = []
    for line in (ROOT / "docs" / "guide-map.md").read_text().splitlines():
        cells = tuple(cell.strip() for cell in line.strip("|").split("|"))
        if line.startswith("|") and len(cells) == 4 and cells[0] not in ("guide", "---"):
            rows.append(cells)
    return rows


ROWS = read_rows()


def resolve(path: str) -> object:
    """Import `module:object.attribute`; a field of a pydantic class resolves to its description."""
    module_name, _, names = path.partition(":")
    found: object = importlib.import_module(module_name)
    for name in filter(None, names.split(".")):
        fields = getattr(found, "model_fields", {})
        found = fields[name] if name in fields else getattr(found, name)
    return found


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_row(row):
    guide, ours, test, issue = row
    assert issue in ISSUES
    for path in re.findall(r"fsdpbench(?:\.\w+)+(?::\w+(?:\.\w+)*)?", ours):
        resolve(path)
    if ours.startswith("issue "):
        assert issue != "A"
        assert test == "-"
        return
    assert ours.startswith(("fsdpbench.", "replaced by "))
    assert (ROOT / test).is_file()
    default = re.match(r"field `\w+`, default `(.+)`$", guide)
    if default:
        field = resolve(ours)
        value = field.get_default(call_default_factory=True)
        written = default[1]
        assert written in (
            repr(value),
            repr(value).replace("'", '"'),
            f"{type(value).__name__}()",
        ) or (written == type(value).__name__)


def test_the_map_is_whole():
    assert len(ROWS) > 90
    assert len({row[0] for row in ROWS}) == len(ROWS)
