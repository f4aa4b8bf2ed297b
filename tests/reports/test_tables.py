from __future__ import annotations

import math

import pytest

from fsdpbench.reports.tables import (
    Cell,
    Column,
    Row,
    Table,
    bytes_cell,
    difference_cell,
    format_count,
    format_range,
    format_value,
    percent_cell,
    rate_cell,
    seconds_cell,
    text_cell,
)
from fsdpbench.units import GIB


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (3, "3"),
        (0.1, "0.1"),
        (1e-5, "1e-05"),
        ("fsdp:d2", "fsdp:d2"),
        ("two\nlines\tof text", "two lines of text"),
        ("", '""'),
        (["a", 1], '["a", 1]'),
        ({"a": None}, '{"a": null}'),
        ("x" * 300, "x" * 197 + "..."),
    ],
)
def test_values_read_on_one_line(value, text):
    assert format_value(value) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(123456.7, "123,457"), (100.4, "100"), (99.44, "99.4"), (9.876, "9.88"), (0.0123, "0.0123")],
)
def test_counts_keep_their_digits(number, text):
    assert format_count(number) == text


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (0.405, 0.431, "405 - 431 ms"),
        (1.21, 3.48, "1.2 - 3.5 s"),
        (0.95, 1.2, "950 ms - 1.2 s"),
        (65, 130, "1 min 05 s - 2 min 10 s"),
    ],
)
def test_ranges_say_a_shared_unit_once(low, high, text):
    assert format_range(low, high) == text


def test_seconds_show_the_median_and_its_interval():
    cell = seconds_cell([0.4, 0.5, 0.42, 0.41, 0.43], "why")
    assert (cell.text, cell.value, cell.detail) == ("420 ms", 0.42, "400 - 500 ms, n=5")


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        (seconds_cell([], "no step"), "no step"),
        (seconds_cell([0.4, math.nan], "no step"), "a sample is not finite"),
        (rate_cell(None, "no rate"), "no rate"),
        (rate_cell(math.inf, "no rate"), "no rate"),
        (percent_cell(None, "no mfu"), "no mfu"),
        (bytes_cell(None, "no bytes"), "no bytes"),
        (text_cell(None, "no text"), "no text"),
        (difference_cell(None, 2.0, "no rate"), "no rate"),
        (difference_cell(1.0, None, "no best"), "no best"),
    ],
)
def test_an_absent_value_is_a_dash_with_its_reason(cell, reason):
    assert (cell.text, cell.value, cell.reason) == ("-", None, reason)


def test_differences_are_per_cent_of_the_best():
    assert difference_cell(200.0, 200.0, "").text == "best"
    worse = difference_cell(150.0, 200.0, "")
    assert (worse.text, worse.value) == ("-25.0 %", -0.25)


def test_bytes_carry_their_unit_and_share():
    assert bytes_cell(3 * GIB, "").text == "3.00 GiB"
    assert bytes_cell(3 * GIB, "", 4 * GIB).detail == "75% of 4.00 GiB"


def test_columns_are_left_out_with_their_cells():
    columns = (Column("a", "A"), Column("b", "B"), Column("c", "C"))
    rows = (Row("r", (Cell("1"), Cell("2"), Cell("3"))),)
    table = Table("t", "c", columns, rows, ("note",)).without(["b"])
    assert [column.key for column in table.columns] == ["a", "c"]
    assert [cell.text for cell in table.rows[0].cells] == ["1", "3"]
    assert table.notes == ("note",)
    assert table.column_index("c") == 1
    with pytest.raises(KeyError):
        table.column_index("b")
