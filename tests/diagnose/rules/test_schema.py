import pytest

from fsdpbench.diagnose.rules.schema import Role, Rule

GOOD = {
    "id": "a-rule",
    "class": "mesh",
    "match": [{"has": "Boom", "regex": r"Boom (?P<what>\d+)"}],
    "cause": ["{what} is wrong"],
    "remedies": ["mend it"],
}


def test_a_good_rule_stands():
    rule = Rule.model_validate(GOOD)
    assert (rule.role, rule.failure_class) == (Role.CAUSE, "mesh")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": "A Rule"}, "id"),
        ({"class": "nonsense"}, "class"),
        ({"match": []}, "match"),
        ({"match": [{"has": "abc"}]}, "4 characters"),
        ({"match": [{"has": "Boom", "regex": "("}]}, "missing|unterminated"),
        ({"cause": []}, "needs a cause"),
        ({"remedies": []}, "needs a cause"),
        ({"cause": ["{other}"]}, "nowhere"),
        ({"when": "other > 1"}, "nowhere"),
        ({"when": "what.x"}, "arithmetic"),
        ({"derive": {"a": "other + 1"}}, "nowhere"),
        ({"grows": "other"}, "nowhere"),
        ({"near": ["["]}, "unterminated"),
        ({"confidence": 2}, "confidence"),
        ({"priority": 101}, "priority"),
        ({"unknown_key": 1}, "unknown_key"),
    ],
)
def test_a_bad_rule_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Rule.model_validate({**GOOD, **change})


@pytest.mark.parametrize("role", ["echo", "hint", "benign"])
def test_roles_without_verdict_need_no_cause(role):
    Rule.model_validate({**GOOD, "role": role, "cause": [], "remedies": []})
