"""The engine on real GPUs in bf16: within bf16 noise of one process in fp32."""

from __future__ import annotations

import numpy as np
import pytest

from tests.distributed.pool import run_on_ranks
from tests.engine.test_fsdp_engine import make_config, reference

PROOF = "tests.distributed.payloads.engine_proof"
CHECKS = "tests.distributed.payloads.engine_checks"
NOISE = 2e-2  # relative, for losses and norms of a tiny model in bf16


def gpu_config(model: str, mesh: str, **changes) -> dict:
    return make_config(
        model, mesh, **{"dtype": "bfloat16", "attn_impl": "flash_attention_2", **changes}
    )


def check_within_noise(results: list[dict], model: str) -> None:
    expected = reference(model)
    for result in results:
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=NOISE)
        np.testing.assert_allclose(result["norms"], expected["norms"], rtol=NOISE)


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["tiny-qwen3", "tiny-llama"])
@pytest.mark.parametrize("attn_impl", ["flash_attention_2", "sdpa", "auto"])
def test_one_gpu_agrees_with_fp32(model, attn_impl):
    config = gpu_config(model, "d1", attn_impl=attn_impl)
    check_within_noise(run_on_ranks(f"{PROOF}:train", 1, device_type="cuda", config=config), model)


@pytest.mark.gpu
def test_one_gpu_in_fp32_is_exact_to_kernel_rounding():
    config = gpu_config("tiny-qwen3", "d1", dtype="float32", attn_impl="sdpa")
    (result,) = run_on_ranks(f"{PROOF}:train", 1, device_type="cuda", config=config)
    np.testing.assert_allclose(result["losses"], reference("tiny-qwen3")["losses"], rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": True},
        {"fsdp": {"offload_params": True}},
        {"optimizer_dtype": "bfloat16", "optimizer": {"type": "adam_bf16", "lr": 1e-3}},
    ],
    ids=["checkpointing", "offload", "adam_bf16"],
)
def test_memory_options_on_one_gpu(changes):
    config = gpu_config("tiny-qwen3", "d1", **changes)
    (result,) = run_on_ranks(f"{PROOF}:train", 1, device_type="cuda", config=config)
    expected = reference("tiny-qwen3")
    np.testing.assert_allclose(result["losses"], expected["losses"], rtol=NOISE)


@pytest.mark.gpu
def test_a_non_finite_norm_skips_the_step_on_the_gpu():
    config = gpu_config("tiny-llama", "d1")
    (result,) = run_on_ranks(f"{CHECKS}:skip_non_finite", 1, device_type="cuda", config=config)
    assert result["bad"]["update_successful"] == 0.0
    for name, before in result["before"].items():
        np.testing.assert_array_equal(before, result["after"][name], err_msg=name)


@pytest.mark.gpu
def test_tracing_has_device_time(tmp_path):
    config = gpu_config("tiny-qwen3", "d1")
    (result,) = run_on_ranks(
        f"{CHECKS}:trace", 1, device_type="cuda", config=config, folder=str(tmp_path)
    )
    assert result["phases"]["backward"] == 6
    assert result["stats"]["memory/peak_allocated_bytes"] > 0


@pytest.mark.multi_gpu
@pytest.mark.parametrize("mesh", ["d2", "t2", "c2"])
@pytest.mark.parametrize("model", ["tiny-qwen3", "tiny-llama"])
@pytest.mark.parametrize("offload", [False, True], ids=["resident", "offload"])
def test_two_gpus_agree_with_fp32(model, mesh, offload):
    config = gpu_config(model, mesh, fsdp={"offload_params": offload})
    check_within_noise(run_on_ranks(f"{PROOF}:train", 2, device_type="cuda", config=config), model)
