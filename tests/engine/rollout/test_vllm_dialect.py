"""Requests to vLLM and its answers, as recorded from the real server (0.32.0)."""

from __future__ import annotations

import base64

import pytest

from fsdpbench.engine.rollout.dialects import GenerationRequest
from fsdpbench.engine.rollout.generation import SamplingSettings
from fsdpbench.engine.rollout.vllm_dialect import VllmDialect
from fsdpbench.engine.weight_sync.records import Bucket, GroupAddress, TensorSpec
from fsdpbench.errors import WeightSyncError, WorkerError

UNIQUE_ID = base64.b64encode(bytes(128)).decode()
ADDRESS = GroupAddress("10.0.0.1", 5000, "g", 3, 1, "nccl", 5.0, unique_id=UNIQUE_ID)
SPECS = (TensorSpec("a", (4, 8), "bfloat16"), TensorSpec("b", (8,), "float32"))
RECORDED = {
    "id": "cmpl-b79a21f00f28a6f5",
    "object": "text_completion",
    "model": "policy",
    "choices": [
        {
            "index": 0,
            "text": "",
            "logprobs": {
                "text_offset": [0, 12],
                "token_logprobs": [-2.384563446044922, -2.7150819301605225],
                "tokens": ["token_id:508", "token_id:260"],
                "top_logprobs": [{"token_id:508": -2.38}, {"token_id:260": -2.71}],
            },
            "finish_reason": "stop",
            "stop_reason": 260,
            "token_ids": None,
            "prompt_logprobs": [
                None,
                {"6": {"logprob": -6.4663286209106445, "rank": 86, "decoded_token": None}},
                {"7": {"logprob": -4.456756591796875, "rank": 19, "decoded_token": None}},
            ],
            "prompt_token_ids": None,
        }
    ],
    "usage": {"prompt_tokens": 4, "total_tokens": 6, "completion_tokens": 2},
}


def request(**settings):
    sampling = SamplingSettings(**{"max_new_tokens": 8, "temperature": 0.5, **settings})
    return GenerationRequest("policy", (5, 6, 7), 1, 11, sampling)


def test_generation_is_stated_in_full():
    call = VllmDialect().generate(request())
    assert (call.method, call.path) == ("POST", "/v1/completions")
    body = dict(call.body)
    assert body["prompt"] == [5, 6, 7]
    assert (body["max_tokens"], body["temperature"], body["seed"]) == (7, 0.5, 11)
    assert (body["top_p"], body["top_k"], body["repetition_penalty"]) == (1.0, -1, 1.0)
    assert "ignore_eos" not in body


@pytest.mark.parametrize("ids", [(), (4, 5)])
def test_stop_tokens(ids):
    body = VllmDialect().generate(request(stop_token_ids=ids)).body
    assert body["ignore_eos"] is True
    assert body["stop_token_ids"] == list(ids)


def test_recorded_answer_is_read():
    part = VllmDialect().read_generation(RECORDED)
    assert part["tokens"] == [508, 260]
    assert part["logprobs"] == pytest.approx([-2.38456, -2.71508], abs=1e-5)
    assert part["finish_reason"] == "stop"
    assert VllmDialect().read_scores(RECORDED, [5, 6, 7]) == pytest.approx([-6.46633, -4.45676])


@pytest.mark.parametrize("tokens", [[5, 6], [5, 6, 8], [5, 6, 7, 8]])
def test_scores_of_other_tokens_are_refused(tokens):
    with pytest.raises(WorkerError, match="prompt_logprobs"):
        VllmDialect().read_scores(RECORDED, tokens)


def test_group_calls():
    dialect = VllmDialect()
    (join,) = dialect.join_group(ADDRESS)
    assert join.path == "/init_weight_transfer_engine"
    info = join.body["init_info"]
    assert (info["rank_offset"], info["world_size"], info["packed"]) == (1, 3, True)
    assert info["nccl_unique_id_b64"] == UNIQUE_ID
    (update,) = dialect.receive_bucket(Bucket(0, SPECS), ADDRESS)
    assert update.body["update_info"] == {
        "names": ["a", "b"],
        "dtype_names": ["bfloat16", "float32"],
        "shapes": [[4, 8], [8]],
    }
    assert Bucket(0, SPECS).num_bytes < info["packed_buffer_size_bytes"]


def test_packing_was_settled_with_the_group():
    with pytest.raises(WeightSyncError, match="packed=False"):
        VllmDialect(packed=True).receive_bucket(Bucket(0, SPECS, packed=False), ADDRESS)
    assert VllmDialect(packed=False).join_group(ADDRESS)[0].body["init_info"]["packed"] is False


def test_group_without_unique_id_is_refused():
    address = GroupAddress("10.0.0.1", 5000, "g", 3, 1, "nccl", 5.0)
    with pytest.raises(WeightSyncError, match="carries none"):
        VllmDialect().join_group(address)


def test_reload_call():
    (call,) = VllmDialect().load_folder("/weights/v00000007", 30.0)
    assert call.path == "/collective_rpc"
    assert call.body["kwargs"] == {"weights_path": "/weights/v00000007"}


def test_facts():
    answers = {
        "models": {"data": [{"id": "policy", "root": "/models/old"}]},
        "world": {"world_size": 4},
        "label": {"weight_version": "default"},
        "server": None,
    }
    facts = VllmDialect().read_facts(answers)
    assert (facts.model, facts.folder, facts.world_size) == ("policy", "/models/old", 4)
    assert facts.weight_version == "default"
    assert facts.takes_groups
