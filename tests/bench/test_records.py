import json
import math

import pytest
from pydantic import ValidationError

from fsdpbench.bench.records import (
    FAILURE_CLASSES,
    Record,
    TrialSpec,
    TrialStatus,
    Verdict,
    WorkerOutcome,
    WorkloadSpec,
    encode,
)


def refuse_constant(name):
    raise AssertionError(f"{name} is not strict JSON")


def test_a_record_survives_the_round_trip_with_numbers_that_are_not_finite():
    verdict = Verdict(**{"class": "numeric"}, cause="loss is NaN", remedies=["lower lr"])
    record = Record(
        id="a",
        status="crashed",
        losses=[1.0, math.nan, math.inf],
        verdict=verdict,
        axes={"x": None},
    )
    line = encode(record)
    assert "\n" not in line
    assert json.loads(line, parse_constant=refuse_constant)["verdict"]["class"] == "numeric"
    back = Record.model_validate_json(line)
    assert math.isnan(back.losses[1])
    assert back.losses[2] == math.inf
    assert back.verdict == verdict
    assert back.axes == {"x": None}


def test_records_carry_the_documented_fields():
    promised = (
        "schema_version id status axes config environment commit dirty started_at step_seconds "
        "warmup_steps tokens_per_second tokens_per_second_per_gpu mfu mfu_formula "
        "peak_device_bytes peak_reserved_bytes device_total_bytes peak_host_bytes phases "
        "reason verdict"
    )
    assert set(promised.split()) <= json.loads(encode(Record(id="a", status="ok"))).keys()
    contract = "class cause root_rank phase remedies evidence confidence rule"
    verdict = Verdict(**{"class": "other"}, cause="x")
    assert set(json.loads(encode(verdict))) == set(contract.split())


def test_statuses_and_classes_are_those_of_the_product():
    statuses = "ok invalid pruned oom host_oom hang timeout crashed contaminated"
    assert [status.value for status in TrialStatus] == statuses.split()
    failures = {status.value for status in TrialStatus if status.is_failure}
    assert failures == set(statuses.split()) - {"ok", "invalid", "pruned"}
    assert len(FAILURE_CLASSES) == len(set(FAILURE_CLASSES)) == 17
    with pytest.raises(ValidationError):
        Verdict(**{"class": "bad luck"}, cause="x")


def test_messages_are_strict_and_records_skip_later_additions():
    with pytest.raises(ValidationError, match="stepz"):
        WorkerOutcome(stepz=[1.0])
    with pytest.raises(ValidationError, match="stepz"):
        WorkloadSpec(stepz=3)
    line = json.loads(encode(Record(id="a", status="ok"))) | {"added_later": 1}
    assert Record.model_validate(line).id == "a"


def test_a_trial_spec_survives_the_round_trip():
    spec = TrialSpec(id="a", config={"path": "tiny"}, axes={"p": 1}, fault="hang@2", world_size=2)
    assert TrialSpec.model_validate_json(encode(spec)) == spec


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({}, 1024),
        ({"sequence_lengths": None}, 1024),
        ({"sequence_lengths": [40, 24]}, 64),
        ({"sequence_lengths": (40, 24)}, 64),
        ({"sequence_lengths": [40, 24], "tokens_per_step": 64}, 64),
        ({"sequence_lengths": None, "tokens_per_step": 512}, 512),
    ],
    ids=str,
)
def test_lengths_add_up_to_the_tokens_of_a_step_and_survive_the_round_trip(given, tokens):
    workload = WorkloadSpec(**given)
    assert workload.tokens_per_step == tokens
    assert WorkloadSpec.model_validate_json(encode(workload)) == workload
    assert WorkloadSpec(**workload.model_dump(mode="json")) == workload


@pytest.mark.parametrize("lengths", ["many", ["many"], [None], {"a": 1}], ids=str)
def test_wrong_lengths_are_the_only_thing_said_of_them(lengths):
    with pytest.raises(ValidationError) as caught:
        WorkloadSpec(sequence_lengths=lengths)
    assert {line["loc"][0] for line in caught.value.errors()} == {"sequence_lengths"}
