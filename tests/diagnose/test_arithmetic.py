import pytest

from fsdpbench.diagnose.arithmetic import evaluate, names_in


@pytest.mark.parametrize(
    ("text", "values", "result"),
    [
        ("a + b * 2", {"a": 1, "b": 3}, 7),
        ("(a - b) / 4", {"a": "9", "b": "1"}, 2),
        ("a // b", {"a": 7, "b": 2}, 3),
        ("a % b", {"a": 7, "b": 2}, 1),
        ("-a", {"a": 2}, -2),
        ("bytes(amount, unit)", {"amount": "1.5", "unit": "GiB"}, 1.5 * 2**30),
        ("round(100 * gen / step)", {"gen": "31.27", "step": "43.64"}, 72),
        ("max(a, b) - min(a, b)", {"a": "1,000", "b": 1}, 999),
        ("a >= 2 and b < 1", {"a": 2, "b": 0.5}, True),
        ("a > 2 or b > 2", {"a": 2, "b": 0.5}, False),
        ("abs(a)", {"a": -3}, 3),
    ],
)
def test_evaluates(text, values, result):
    assert evaluate(text, values) == result


@pytest.mark.parametrize(
    ("text", "values"), [("a + b", {"a": 1}), ("a / 0", {"a": 1}), ("a + 1", {"a": "x"})]
)
def test_what_cannot_be_computed_is_an_error(text, values):
    with pytest.raises(ValueError, match=r"comput|convert"):
        evaluate(text, values)


@pytest.mark.parametrize(
    "text", ["__import__('os')", "a.b", "[1]", "lambda: 1", "open('x')", "a +", "a if b else c"]
)
def test_anything_but_arithmetic_is_refused(text):
    with pytest.raises(ValueError, match=r"arithmetic|calls"):
        names_in(text)


def test_lists_names_without_functions():
    assert names_in("round(gen / step, digits)") == {"gen", "step", "digits"}
