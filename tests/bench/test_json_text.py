import re
from pathlib import Path

import pytest

from fsdpbench.bench.json_text import MAX_DEPTH, is_too_deep, parse_json, parse_object

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Expecting value at column 1"),
        ('{"a": ', "Expecting value at column 7"),
        ('\n{"a" 1}', "at line 2, column 6"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
        (b"\xff\xfe\x00", "no UTF-8"),
        (b'{"a": "\x80"}', "no UTF-8"),
        ("9" * 5000, "limit"),
    ],
    ids=["empty", "cut", "second-line", "lists", "objects", "utf-16", "latin-1", "digits"],
)
def test_whatever_is_no_json_is_a_value_error(text, words):
    with pytest.raises(ValueError, match=words):
        parse_json(text)


@pytest.mark.parametrize("text", ["[1]", "null", '"x"', "3", "NaN"])
def test_another_kind_of_value_is_no_object(text):
    with pytest.raises(ValueError, match="must hold an object"):
        parse_object(text)
    assert parse_object(b'{"a": 1}') == {"a": 1}


def nest(depth):
    value = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def test_depth():
    assert not is_too_deep(1)
    assert not is_too_deep(nest(MAX_DEPTH))
    assert is_too_deep(nest(MAX_DEPTH + 1))
    assert is_too_deep(nest(100_000))


def test_all_readers_come_through_here():
    """A bare `json.loads` raises RecursionError, which no reader thinks of."""
    found = [
        str(path.relative_to(ROOT))
        for top in ("bench", "diagnose", "reports")
        for path in (ROOT / top).rglob("*.py")
        if re.search(r"\bjson\.loads?\(|JSONDecoder", path.read_text())
    ]
    assert found == ["bench/json_text.py"]
