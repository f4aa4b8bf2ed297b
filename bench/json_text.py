"""Parses JSON that others may have written, damaged or made on purpose.

Every module here that reads JSON comes through `parse_json`, so that each way in which a text can
be no JSON is one exception: a reader that catches ValueError survives them all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

MAX_DEPTH = 64
"""Levels of nesting that a value of ours may have; pydantic reads back 200, Python about 1000."""


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text; ValueError if it is cut, no UTF-8, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"{error.msg} at {line}column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no UTF-8: {error.reason} at byte {error.start}") from None


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Return the object of a JSON text; ValueError if it is no JSON or another kind of value."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__} and must hold an object")  # noqa: TRY004 - it is the text that is wrong
    return value


def is_too_deep(value: Any) -> bool:
    """Say whether mappings and lists are nested more than MAX_DEPTH levels."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [item for holder in level for item in _list_items(holder)]
        if not level:
            return False
    return True


def _list_items(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()
