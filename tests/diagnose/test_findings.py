import json

import pytest

from fsdpbench.bench.records import FAILURE_CLASSES, TrialStatus
from fsdpbench.diagnose.findings import (
    CheckReport,
    ExitCode,
    Finding,
    Severity,
    exit_code_of,
    verdict_as_json,
)
from fsdpbench.diagnose.trials import TrialVerdict
from fsdpbench.diagnose.verdicts import make_verdict


@pytest.mark.parametrize(
    ("severities", "code"),
    [
        ([], 0),
        ([Severity.NOTE], 0),
        ([Severity.UNDECIDED, Severity.NOTE], 6),
        ([Severity.UNDECIDED, Severity.PROBLEM], 4),
    ],
)
def test_exit_code_of_a_check(severities, code):
    findings = tuple(Finding(severity, "a", "b") for severity in severities)
    report = CheckReport("c.yaml", "engine", 2, findings)
    assert report.exit_code == code
    assert report.as_json()["ok"] == (code == 0)
    json.dumps(report.as_json())


@pytest.mark.parametrize("failure_class", FAILURE_CLASSES)
def test_exit_code_of_an_explanation(failure_class):
    expected = {"healthy": ExitCode.FINE, "unknown": ExitCode.UNDECIDED}
    verdict = make_verdict(failure_class, "x")
    assert exit_code_of(verdict) == expected.get(failure_class, ExitCode.PROBLEM)


def test_the_json_contract():
    verdict = make_verdict("mesh", "x", root_rank=1)
    keys = ["class", "cause", "root_rank", "phase", "remedies", "evidence", "confidence", "rule"]
    assert list(verdict_as_json(verdict)) == keys
    trial = TrialVerdict("abc", TrialStatus.CRASHED, verdict)
    both = verdict_as_json(verdict, [trial, TrialVerdict("def", TrialStatus.OK, None)])
    assert both["trials"][0]["verdict"]["class"] == "mesh"
    assert both["trials"][1] == {"id": "def", "status": "ok", "verdict": None}
