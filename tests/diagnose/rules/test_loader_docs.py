import re
from pathlib import Path

from fsdpbench.bench.records import FAILURE_CLASSES
from fsdpbench.diagnose.explain import explain_text
from fsdpbench.diagnose.rules.loader import parse_rules
from fsdpbench.diagnose.rules.schema import Rule

DOCS = Path(__file__).parents[3] / "docs" / "diagnose.md"
TEXT = DOCS.read_text(encoding="utf-8")


def block(language):
    return re.search(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)[1]


def test_the_example_rule_answers_the_example_log():
    verdict = explain_text(block("text"), rules=parse_rules(block("toml"), "docs"))
    assert verdict.rule == "example-queue-full"
    assert verdict.cause == "the queue holds 17 of 16 items"


def test_the_example_output_is_real():
    sample = Path(__file__).parents[1] / "samples" / "rank-killed.log"
    verdict = explain_text(sample.read_text(encoding="utf-8"))
    assert f"rank_death: {verdict.cause}\n" in TEXT
    assert f"  1. {verdict.remedies[0]}\n" in TEXT


def test_every_class_and_rule_field_is_documented():
    for name in FAILURE_CLASSES:
        assert name in TEXT
    for name, field in Rule.model_fields.items():
        assert (field.alias or name) in TEXT
