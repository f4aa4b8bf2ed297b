"""Single behaviours of the engine on real process groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdpbench.engine.config.train import FinetuneSpec, TrainEngineConfig
from fsdpbench.engine.fsdp_engine import FSDPEngine
from fsdpbench.errors import ConfigError, FsdpbenchError
from tests.distributed.payloads.engine_proof import LENGTHS, make_batch
from tests.distributed.pool import run_on_ranks
from tests.engine.test_fsdp_engine import TOLERANCE, folder_of, make_config

PAYLOADS = "tests.distributed.payloads.engine_checks"
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=1, train_batch_size=1)


@pytest.mark.parametrize(
    "optimizer",
    [
        {"type": "adam", "lr": 1e-3},
        {"type": "sgd", "lr": 1e-2},
        {"type": "adam_bf16", "lr": 1e-3},
    ],
    ids=lambda value: value["type"],
)
def test_a_non_finite_norm_skips_the_step(optimizer):
    dtype = "bfloat16" if optimizer["type"] == "adam_bf16" else "float32"
    config = make_config("tiny-llama", "d2", optimizer=optimizer, optimizer_dtype=dtype)
    config["dtype"] = dtype  # weights kept in bf16 are computed with in bf16
    poisoned = run_on_ranks(f"{PAYLOADS}:skip_non_finite", 2, config=config)
    clean = run_on_ranks(f"{PAYLOADS}:train_without_poison", 2, config=config)
    for result, expected in zip(poisoned, clean, strict=True):
        assert result["bad"]["update_successful"] == 0.0
        assert not np.isfinite(result["bad"]["grad_norm"])
        assert result["good"]["loss"] == expected["loss"]
        assert result["good"]["grad_norm"] == expected["grad_norm"]
    for name, before in poisoned[0]["before"].items():
        np.testing.assert_array_equal(before, poisoned[0]["after"][name], err_msg=name)


@pytest.mark.parametrize("mesh", ["d2", "c2t2"])
def test_evaluation_and_forward_agree_with_a_plain_model(mesh):
    results = run_on_ranks(
        f"{PAYLOADS}:evaluate", 2 if mesh == "d2" else 4, config=make_config("tiny-qwen3", mesh)
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder_of("tiny-qwen3"), dtype=torch.float32, attn_implementation="eager"
    )
    batch = make_batch(0)
    for result in results:
        assert result["eval"]["loss"] == pytest.approx(result["train"]["loss"], rel=TOLERANCE)
        assert result["forward_only"]["loss"] == result["eval"]["loss"]
        for position, row in enumerate(result["rows"]):
            length = LENGTHS[row]
            ids = batch["input_ids"][row : row + 1, :length]
            with torch.no_grad():
                logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1], dim=-1)
            picked = logprobs.gather(1, ids[0, 1:, None])[:, 0].numpy()
            found = result["logprobs"][position]
            np.testing.assert_allclose(found[1:length], picked, rtol=1e-5, atol=1e-6)
            assert found[0] == 0
            assert not found[length:].any()
            entropy = -(logprobs.exp() * logprobs).sum(-1).numpy()
            np.testing.assert_allclose(
                result["entropy"][position][1:length], entropy, rtol=1e-5, atol=1e-6
            )


@pytest.mark.parametrize("cut", [1, 7, 11])
def test_uneven_ranks_train_as_one_batch(cut):
    config = make_config("tiny-qwen3", "d2", mb_spec={"n_mbs": 1, "max_tokens_per_mb": 40})
    even = run_on_ranks(f"{PAYLOADS}:train_uneven", 2, config=config, cut=6)
    uneven = run_on_ranks(f"{PAYLOADS}:train_uneven", 2, config=config, cut=cut)
    for result in uneven:
        for name in ("loss", "grad_norm"):
            assert result["stats"][name] == pytest.approx(even[0]["stats"][name], rel=TOLERANCE)
    for name, value in even[0]["weights"].items():
        bound = TOLERANCE * np.abs(value).max()
        np.testing.assert_allclose(uneven[0]["weights"][name], value, rtol=0, atol=bound)


def test_the_parts_of_a_step_make_the_whole():
    config = make_config("tiny-llama", "d1")
    (result,) = run_on_ranks(f"{PAYLOADS}:accumulate_by_hand", 1, config=config)
    assert result["same"]
    for name in ("loss", "grad_norm", "update_successful"):
        assert result["parts"][name] == result["whole"][name]


def test_inference_only_refuses_to_train():
    (messages,) = run_on_ranks(
        f"{PAYLOADS}:refuse_training", 1, config=make_config("tiny-llama", "d1")
    )
    assert len(messages) == 3
    assert all("inference only" in message for message in messages)


@pytest.mark.parametrize("model", ["tiny-qwen3", "tiny-llama"])
def test_saved_weights_load_here_and_in_transformers(model, tmp_path):
    folder = tmp_path / "saved"
    config = make_config(model, "d2t2")
    result = run_on_ranks(f"{PAYLOADS}:save_and_load", 4, config=config, folder=str(folder))[0]
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, value in plain.named_parameters():
        np.testing.assert_array_equal(result["saved"][name], value.detach().numpy(), err_msg=name)
    assert set(result["loaded"]) == {name for name, _ in plain.named_parameters()}
    for name, value in result["saved"].items():
        np.testing.assert_array_equal(result["loaded"][name], value, err_msg=name)
    assert any((result["changed"][k] != v).any() for k, v in result["saved"].items())


def test_tracing_and_figures(tmp_path):
    config = make_config("tiny-qwen3", "d2t2")
    results = run_on_ranks(f"{PAYLOADS}:trace", 4, config=config, folder=str(tmp_path))
    for rank, result in enumerate(results):
        expected = {"forward": 6, "backward": 6, "clip": 2, "optimizer": 2}
        assert {name: result["phases"][name] for name in expected} == expected
        assert result["file"].endswith(f"rank{rank}.jsonl")
        assert result["stats"]["num_micro_batches"] == 3.0
        assert result["version"] == 7
        assert result["dp_rank"] == rank // 2
        assert result["head"] == rank // 2 * 2
        assert result["is_head"] == (rank % 2 == 0)
        assert result["groups"] == [2, 2, 4]
        assert result["kernel"]
    assert len(list(tmp_path.glob("rank*.jsonl"))) == 4


def test_initialize_says_what_is_missing():
    engine = FSDPEngine(TrainEngineConfig(path="tiny-llama"))
    with pytest.raises(ConfigError) as caught:
        engine.initialize(addr="tcp://somewhere", ft_spec=None)
    assert len(caught.value.violations) == 2
    assert not engine.initialized


@pytest.mark.parametrize("name", ["parts", "meshes", "data_parallel_rank", "model_facts"])
def test_use_before_initialize_is_refused(name):
    engine = FSDPEngine(TrainEngineConfig(path="tiny-llama"))
    with pytest.raises(FsdpbenchError, match="call "):
        getattr(engine, name)
    engine.destroy()
