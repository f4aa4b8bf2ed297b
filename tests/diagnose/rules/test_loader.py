import pytest

from fsdpbench.bench.records import FAILURE_CLASSES
from fsdpbench.diagnose.prefilter import rarest_gram
from fsdpbench.diagnose.rules.loader import check_unique, load_background, load_rules, parse_rules
from fsdpbench.diagnose.rules.schema import Role
from fsdpbench.errors import ConfigError


def test_every_class_has_rules():
    classes = {rule.failure_class for rule in load_rules() if rule.role is not Role.HINT}
    assert classes == set(FAILURE_CLASSES)


def test_verdict_rules_name_the_wording_they_know():
    assert not [rule.id for rule in load_rules() if not rule.wording]


def test_classes_follow_from_roles():
    for rule in load_rules():
        assert (rule.failure_class == "healthy") == (rule.role is Role.BENIGN), rule.id
        if rule.role in (Role.ECHO, Role.HINT):
            assert rule.failure_class == "unknown", rule.id


def test_healthy_logs_do_not_stop_the_search():
    """Hardly a literal has its rarest four bytes in lines that healthy logs repeat."""
    background = load_background().encode()
    literals = {pattern.has.encode() for rule in load_rules() for pattern in rule.match}
    common = {text for text in literals if rarest_gram(text, background) in background}
    assert common <= {b"NET/IB"}


@pytest.mark.parametrize("text", ["[[rule]", "[[rule]]\nid = 1", "x = 1"])
def test_a_malformed_file_names_itself(text):
    with pytest.raises(ConfigError, match=r"odd\.toml"):
        parse_rules(text, "odd.toml")


def test_ids_are_unique():
    check_unique(load_rules())
    with pytest.raises(ConfigError, match="unique"):
        check_unique([load_rules()[0], load_rules()[0]])
