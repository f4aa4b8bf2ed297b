from pathlib import Path

import pytest
import typer

from fsdpbench.bench.arguments import parse_path, parse_text


@pytest.mark.parametrize("value", ["", " ", "\t\n", "a\0b"])
def test_what_is_no_value_is_a_usage_error(value):
    for parse in (parse_text, parse_path):
        with pytest.raises(typer.BadParameter):
            parse(value)


def test_values():
    assert parse_text(" a ") == " a "
    assert parse_path(".") == parse_path(Path()) == Path()
