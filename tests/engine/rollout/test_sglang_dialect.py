"""Requests to SGLang, held against the fields of its own request classes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path

import pytest

from fsdpbench.engine.rollout.dialects import GenerationRequest
from fsdpbench.engine.rollout.generation import SamplingSettings
from fsdpbench.engine.rollout.sglang_dialect import SglangDialect
from fsdpbench.engine.weight_sync.records import Bucket, GroupAddress, TensorSpec
from fsdpbench.errors import WorkerError
from tests.engine.rollout.sglang_schema import BODILESS, read_schema

RECORDED = Path(__file__).parent / "recorded" / "sglang-0.5.23.json"
ADDRESS = GroupAddress("10.0.0.1", 5000, "g", 3, 1, "nccl", 5.0)
BUCKET = Bucket(0, (TensorSpec("a", (4, 8), "bfloat16"),))
KINDS = {int: "int", str: "str", bool: "bool", float: "float", list: "List", dict: "Dict"}


def all_calls():
    dialect = SglangDialect()
    settings = SamplingSettings(8, temperature=0.5, stop_token_ids=())
    return [
        *dialect.ask_facts().values(),
        *dialect.pause("abort"),
        *dialect.resume(),
        *dialect.join_group(ADDRESS),
        *dialect.begin_update(),
        *dialect.receive_bucket(BUCKET, ADDRESS),
        *dialect.receive_bucket(Bucket(1, BUCKET.specs, packed=False), ADDRESS),
        *dialect.load_folder("/weights/v1", 5.0),
        *dialect.finish_update("1", in_session=True),
        *dialect.leave_group(ADDRESS),
        dialect.generate(GenerationRequest("m", (5, 6), 0, 11, settings)),
        dialect.score("m", [5, 6, 7]),
    ]


def check_fields(values, fields, where):
    for name, value in values.items():
        assert name in fields, f"{where}: no field {name}"
        kind = fields[name]["type"]
        fits = KINDS[type(value)] in kind or (kind.startswith("Literal") and repr(value) in kind)
        assert fits or "Set[int]" in kind, f"{where}.{name}: {value!r} is no {kind}"
    missing = [n for n, field in fields.items() if field["required"] and n not in values]
    assert not missing, f"{where} lacks {missing}"


def check_calls(schema):
    assert not schema["missing_paths"]
    for call in all_calls():
        if call.path in BODILESS:
            assert call.body is None
            continue
        check_fields(call.body, schema["requests"][call.path], call.path)
        if "sampling_params" in call.body:
            sampling = call.body["sampling_params"]
            check_fields(sampling, schema["sampling_params"], "sampling_params")


def test_requests_fit_the_recorded_classes():
    check_calls(json.loads(RECORDED.read_text()))


def test_requests_fit_the_installed_package():
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("sglang is not installed")
    schema = read_schema(Path(spec.submodule_search_locations[0]).parent)
    check_calls(schema)
    if RECORDED.stem == f"sglang-{importlib.metadata.version('sglang')}":
        assert schema == json.loads(RECORDED.read_text())


def test_a_wrong_field_would_be_found():
    fields = json.loads(RECORDED.read_text())["requests"]["/update_weights_from_disk"]
    check_fields({"model_path": "/a"}, fields, "right")
    for wrong in ({}, {"model_path": 3}, {"model_path": "/a", "path": "/a"}):
        with pytest.raises(AssertionError):
            check_fields(wrong, fields, "wrong")


def test_buckets():
    (packed,) = SglangDialect().receive_bucket(BUCKET, ADDRESS)
    assert packed.body["load_format"] == "flattened_bucket"
    (single,) = SglangDialect().receive_bucket(Bucket(0, BUCKET.specs, packed=False), ADDRESS)
    assert "load_format" not in single.body


def test_stop_tokens():
    dialect = SglangDialect()

    def sampling(ids):
        settings = SamplingSettings(8, stop_token_ids=ids)
        return dialect.generate(GenerationRequest("m", (5,), 0, 1, settings)).body[
            "sampling_params"
        ]

    assert not {"ignore_eos", "stop_token_ids"} & set(sampling(None))
    assert sampling(())["ignore_eos"] is True
    assert sampling((4,))["stop_token_ids"] == [4]
    assert "ignore_eos" not in sampling((4,))


def test_aborted_in_the_queue():
    answer = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}
    assert SglangDialect().read_generation(answer)["tokens"] == []
    answer["meta_info"]["finish_reason"] = {"type": "length"}
    with pytest.raises(WorkerError, match="/generate"):
        SglangDialect().read_generation(answer)


def test_failures_in_good_answers():
    assert SglangDialect().read_failure({"success": False, "message": "no\nroom"}) == "no room"
    assert SglangDialect().read_failure({"success": True}) is None
    assert SglangDialect().read_failure(None) is None
