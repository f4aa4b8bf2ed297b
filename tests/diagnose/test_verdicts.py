from fsdpbench.diagnose.verdicts import MAX_TEXT, as_evidence, make_verdict


def test_cause_and_evidence_are_redacted():
    verdict = make_verdict("other", "PASSWORD=hunter2hunter2", evidence=[as_evidence("f", 1, "x")])
    assert "hunter2" not in verdict.cause
    assert "hunter2" not in as_evidence("f", 1, "API_KEY=hunter2hunter2").text
    assert verdict.evidence[0].line == 1


def test_long_evidence_is_cut():
    text = as_evidence("f", 1, "  " + "x " * MAX_TEXT).text
    assert text.endswith(" [...]")
    assert len(text) < MAX_TEXT + 10
