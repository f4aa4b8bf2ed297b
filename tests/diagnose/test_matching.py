import io

import pytest

from fsdpbench.diagnose.matching import build_matcher, guess_phase, keep_valid
from fsdpbench.diagnose.rules.loader import parse_rules

HEAD = """
[[rule]]
id = "r"
class = "other"
cause = ["{what}", "plain"]
remedies = ["mend it"]
"""


def hits_of(rule, text):
    matcher = build_matcher(parse_rules(HEAD + rule, "test"))
    matcher.findings.logs["f"] = matcher.scanner.scan(io.BytesIO(text.encode()), "f")
    return keep_valid(matcher.findings.hits, matcher.findings)


MATCH = "match = [{ has = 'Boom', regex = 'Boom (?P<what>[0-9]+)' }]\n"


@pytest.mark.parametrize(
    ("rule", "text", "count"),
    [
        (MATCH, "Boom 1", 1),
        (MATCH, "Boom x", 0),
        (MATCH, "    raise Boom 1", 0),
        (MATCH + "near = ['alpha']", "alpha\nBoom 1", 1),
        (MATCH + "near = ['alpha']", "Boom 1\nalpha", 1),
        (MATCH + "near = ['alpha']\nahead = 0", "Boom 1\nalpha", 0),
        (MATCH + "near = ['alpha']", "alpha\n" + "x\n" * 70 + "Boom 1", 0),
        (MATCH + "not_near = ['alpha']", "alpha\nBoom 1", 0),
        (MATCH + "log_has = ['alpha']", "alpha\n" + "x\n" * 70 + "Boom 1", 1),
        (MATCH + "log_has = ['alpha']", "Boom 1", 0),
        (MATCH + "log_lacks = ['alpha']", "Boom 1\n" + "x\n" * 70 + "alpha", 0),
        (MATCH + "min_hits = 2", "Boom 1", 0),
        (MATCH + "min_hits = 2", "Boom 1\nBoom 2", 2),
        (MATCH + "grows = 'what'", "Boom 1\nBoom 2", 2),
        (MATCH + "grows = 'what'", "Boom 2\nBoom 2", 0),
        (MATCH + "when = 'what > 5'", "Boom 5", 0),
        (MATCH + "when = 'what > 5'", "Boom 6", 1),
        (MATCH + "cleared_by_progress = true", "Boom 1\nstep 2 loss 1.0", 0),
        (MATCH + "cleared_by_progress = true", "step 2 loss 1.0\nBoom 1", 1),
        ("match = [{ has = 'Boom', regex = 'Boom\\n(?P<what>x)', span = 1 }]", "Boom\nx", 1),
    ],
)
def test_conditions_of_a_rule(rule, text, count):
    assert len(hits_of(rule, text)) == count


def test_derived_numbers():
    (hit,) = hits_of(MATCH + "derive = { twice = 'what * 2' }", "Boom 21")
    assert hit.values == {"what": "21", "twice": 42}


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        (["in forward", "in backward"], "backward"),
        (["in step", "torch/optim/adamw.py"], "optimizer"),
        (["in from_pretrained"], "load"),
        (["in _call_impl", "in forward"], "forward"),
        (["in update_weights_from_distributed", "in broadcast"], "weight_sync"),
        (["in main"], None),
        ([], None),
    ],
)
def test_phase_of_a_traceback(frames, phase):
    assert guess_phase([f'  File "a.py", line 1, {frame}' for frame in frames]) == phase


@pytest.mark.parametrize(
    ("text", "is_exception"),
    [
        ('  File "a.py", line 3, in f\nKeyError: 1', True),
        ("torch.AcceleratorError: odd", True),
        ("ERROR something", False),
        ("Traceback (most recent call last):", False),
    ],
)
def test_unknown_errors_are_noticed(text, is_exception):
    matcher = build_matcher(parse_rules(HEAD + MATCH, "test"))
    matcher.scanner.scan(io.BytesIO(text.encode()), "f")
    assert [sign.is_exception for sign in matcher.findings.errors] == [is_exception]


@pytest.mark.parametrize("text", ["error rate 0.1", "KeyError", "FutureWarning: x", "no Errors"])
def test_ordinary_words_are_no_errors(text):
    matcher = build_matcher(parse_rules(HEAD + MATCH, "test"))
    matcher.scanner.scan(io.BytesIO(text.encode()), "f")
    assert not matcher.findings.errors
