import pytest

from fsdpbench.diagnose.prefixes import clean_line, rank_of_path, read_stamp


@pytest.mark.parametrize(
    ("raw", "text", "rank", "actor"),
    [
        ("[rank3]: ValueError: x", "ValueError: x", 3, None),
        ("[rank3]:ValueError: x", "ValueError: x", 3, None),
        ("[default5]:ValueError: x", "ValueError: x", 5, None),
        ("[1,7]<stderr>:ValueError: x", "ValueError: x", 7, None),
        ("(Worker pid=12, ip=10.0.0.1) ValueError: x", "ValueError: x", None, "Worker pid=12"),
        ("(raylet) ValueError: x", "ValueError: x", None, "raylet"),
        ("3: ValueError: x", "ValueError: x", None, None),
        ("0: [rank2]: ValueError: x", "ValueError: x", 2, None),
        ("2026-11-30 10:00:00,123 ValueError: x", "ValueError: x", None, None),
        ("2026-11-30T10:00:00Z ValueError: x", "ValueError: x", None, None),
        ("[2026-03-05 03:55:55 TP0] ValueError: x", "ValueError: x", None, None),
        ("ERROR 11-12 09:10:01 [core.py:700] ValueError: x", "ValueError: x", None, None),
        ("\x1b[31mValueError: x\x1b[0m", "ValueError: x", None, None),
        ("\u2502 ValueError: x    \u2502", "ValueError: x", None, None),
        ("[E1230 P.cpp:6] [Rank 4] late", "[E1230 P.cpp:6] [Rank 4] late", 4, None),
        ("2026-11-30 10:00:00 Traceback (most", "Traceback (most", None, None),
        ("no prefix", "no prefix", None, None),
        ("", "", None, None),
    ],
)  # fmt: skip
def test_strips_prefixes(raw, text, rank, actor):
    clean = clean_line(raw)
    assert (clean.text, clean.rank, clean.actor) == (text, rank, actor)


def test_indentation_stays():
    assert clean_line('[rank0]:   File "a.py", line 1').text == '  File "a.py", line 1'


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-30 12:34:56,5 x",
        "2026-11-30T12:34:56.5",
        "[rank0]:[E1130 12:34:56.500000000 a.cpp:1]",
        "INFO 11-30 12:34:56.5 [a.py:1]",
        "20261130-12:34:56.5 [Engine] x",
        "time      : 2026-11-30_12:34:56.5",
    ],
)
def test_all_clocks_agree(text):
    expected = (11 * 31 + 30) * 86400 + 12 * 3600 + 34 * 60 + 56.5
    assert read_stamp(text) == expected


@pytest.mark.parametrize("text", ["12:34:56 only a clock", "no time", "ratio 3:2"])
def test_no_date_is_no_stamp(text):
    assert read_stamp(text) is None


@pytest.mark.parametrize(
    ("path", "rank"),
    [
        ("logs/abc/attempt_0/3/stderr.log", 3),
        ("logs/rank12.log", 12),
        ("logs/rank_4/output.txt", 4),
        ("errors/rank1.json", 1),
        ("logs/worker-2.log", 2),
        ("rank9-sweep/logs/a/launcher.log", None),
        ("launcher.log", None),
    ],
)
def test_rank_of_a_file(path, rank):
    assert rank_of_path(path) == rank
