from __future__ import annotations

from fsdpbench.bench.records import Record, TrialStatus, Verdict
from fsdpbench.reports.failures import (
    NO_VERDICT,
    build_failures,
    build_not_started,
    count_statuses,
)
from tests.reports.example_runs import make_failed, make_mixed_records, make_record


def test_failures_alike_form_one_group_the_largest_first():
    groups = build_failures(make_mixed_records())
    assert [(group.status, len(group.trials)) for group in groups] == [
        ("oom", 2),
        ("hang", 1),
        ("contaminated", 1),
    ]
    oom = groups[0]
    assert oom.failure_class == "cuda_oom"
    assert oom.cause == "rank 1 ran out of GPU memory in the backward pass"
    assert oom.where == "rank 1, phase backward"
    assert oom.confidence == "98%"
    assert oom.remedies[0] == "set gradient_checkpointing: true"
    assert (oom.evidence[0].file, oom.evidence[0].line) == ("logs/rank1/stderr.log", 214)
    assert oom.reasons == ("worker ended as oom",)
    assert [trial.logs for trial in oom.trials] == ["trials/t005/logs", "trials/t007/logs"]
    assert oom.trials[0].label == "fsdp:t2 +offload_params"
    assert oom.trials[0].ended == "exit code 1 after 35.0 s"


def test_other_causes_are_other_groups():
    verdict = Verdict(failure_class="cuda_oom", cause="another cause")
    records = [
        make_failed(0, TrialStatus.OOM),
        make_failed(1, TrialStatus.OOM).model_copy(update={"verdict": verdict}),
    ]
    assert len(build_failures(records)) == 2


def test_without_a_verdict_the_reason_is_the_cause_and_not_said_twice():
    group = build_failures([make_failed(0, TrialStatus.CRASHED, reason="exit code 7")])[0]
    assert (group.failure_class, group.cause, group.reasons) == ("unknown", "exit code 7", ())
    group = build_failures([make_failed(0, TrialStatus.CRASHED, reason=None)])[0]
    assert group.cause == NO_VERDICT


def test_ok_and_refused_points_are_no_failures():
    assert not build_failures([make_record(0), Record(id="b", status=TrialStatus.INVALID)])


def test_refused_points_say_why():
    table = build_not_started(make_mixed_records())
    assert table.caption == "1 point was refused before a process was started."
    texts = [cell.text for cell in table.rows[0].cells]
    assert texts[0] == "fsdp:t3"
    assert texts[-2:] == [
        "invalid",
        "parallel.tensor=3: must divide num_key_value_heads=8. Use 1, 2, 4 or 8.",
    ]


def test_a_refusal_without_a_reason_is_admitted():
    table = build_not_started([Record(id="a", status=TrialStatus.PRUNED, axes={"lr": 1})])
    assert table.rows[0].cells[-1].reason == "no reason was recorded"


def test_statuses_are_counted_in_their_order():
    assert count_statuses(make_mixed_records()) == [
        ("ok", 8),
        ("invalid", 1),
        ("oom", 2),
        ("hang", 1),
        ("contaminated", 1),
    ]
