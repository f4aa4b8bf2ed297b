"""Logprobs and gradients on every mesh equal those of a plain padded model, to fp32 rounding."""

from __future__ import annotations

import json

import pytest

from fsdpbench.engine.config.parallel import parse_backend
from tests.distributed.pool import run_on_ranks

POLICY = "tests.distributed.payloads.parallel_policy"
MESHES = ["d1", "d2", "t2", "c2", "d2t2", "d2c2", "c2t2", "c4"]  # d2c2t2: test_fsdp_engine
LOGPROBS, GRADIENTS = 2e-6, 1e-5  # largest absolute, and largest relative to the tensor's largest

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
FAMILIES = {
    "llama-biased": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    },
    "mistral-window": {"model_type": "mistral", "sliding_window": 7},
    "qwen2-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "gemma3-text": {
        "model_type": "gemma3_text",
        "sliding_window": 5,
        "sliding_window_pattern": 3,
        "head_dim": 24,  # heads x head_dim differs from hidden_size
        "query_pre_attn_scalar": 30,
        "final_logit_softcapping": 0.8,
    },
}


def run(path: str, mesh: str, **fields) -> list[dict]:
    backend = f"fsdp:{mesh}"
    return run_on_ranks(
        f"{POLICY}:compare_with_plain_model",
        parse_backend(backend).strategy.world_size,
        timeout_seconds=240,
        path=path,
        backend=backend,
        **fields,
    )


def check(path: str, mesh: str, **fields) -> list[dict]:
    results = run(path, mesh, **fields)
    for errors in results:
        assert errors["logprobs"] < LOGPROBS, errors
        assert errors["gradients"] < GRADIENTS, errors
    return results


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("path", ["tiny-qwen3", "tiny-llama"])
def test_equals_a_plain_model(path, mesh):
    check(path, mesh)


@pytest.mark.parametrize("mesh", ["d2", "c2t2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_its_plain_model(tmp_path, family, mesh):
    (tmp_path / "config.json").write_text(json.dumps({**TINY, **FAMILIES[family]}))
    check(str(tmp_path), mesh)


@pytest.mark.parametrize("mesh", ["d2", "d2t2", "c2t2"])
def test_checkpointing_runs_attention_twice_and_changes_nothing(mesh):
    plain = check("tiny-qwen3", mesh)
    recomputed = check("tiny-qwen3", mesh, gradient_checkpointing=True)
    for before, after in zip(plain, recomputed, strict=True):
        assert after["attention_calls"] == 2 * before["attention_calls"]
        assert after["gradient_sum"] == before["gradient_sum"]


@pytest.mark.parametrize("mesh", ["d2", "d2t2"])
def test_offload_keeps_shards_and_gradients_on_the_host(mesh):
    check("tiny-llama", mesh, fsdp={"offload_params": True}, gradient_checkpointing=True)


@pytest.mark.parametrize("attn_impl", ["sdpa", "eager", "auto"])
def test_every_attention_implementation_isolates_sequences(attn_impl):
    check("tiny-qwen3", "c2", attn_impl=attn_impl)


def test_two_engines_of_different_meshes_share_a_process():
    results = run_on_ranks(f"{POLICY}:interleave_two_policies", 2, timeout_seconds=120)
    for alone, interleaved in results:
        assert alone == interleaved


def test_bf16_compute_stays_near_and_answers_in_fp32():
    for facts in run("tiny-qwen3", "t2", dtype="bfloat16"):
        assert facts["dtypes"] == {"torch.float32"}  # masters, gradients and logprobs
        assert 1e-4 < facts["logprobs"] < 0.05  # bf16 noise, and not fp32 after all
        assert facts["gradients"] < 0.1


GPUS = {"device_type": "cuda", "on_gpus": True}


@pytest.mark.multi_gpu
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("mesh", ["d2", "t2", "c2"])
def test_two_gpus_equal_a_plain_model_in_fp32(mesh, offload):
    for facts in run("tiny-qwen3", mesh, fsdp={"offload_params": offload}, **GPUS):
        assert facts["kernel"] == "sdpa"
        assert facts["logprobs"] < 1e-5, facts
        assert facts["gradients"] < 1e-4, facts


@pytest.mark.multi_gpu
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mesh", ["d2", "t2", "c2"])
def test_two_gpus_stay_near_in_bf16(mesh, checkpointing):
    fields = {"dtype": "bfloat16", "gradient_checkpointing": checkpointing}
    for facts in run("tiny-qwen3", mesh, **fields, **GPUS):
        assert facts["kernel"] in ("varlen_attn", "flash_attn")
        assert facts["dtypes"] == {"torch.float32"}
        assert facts["logprobs"] < 0.05, facts
        assert facts["gradients"] < 0.1, facts
