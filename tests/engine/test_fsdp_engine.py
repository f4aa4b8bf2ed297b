"""Proof of correctness: every mesh trains exactly as one process with a padded loop does (fp32).

Tolerance: losses, gradient norms and each final weight tensor (in its norm) agree to 1e-5
relative, and single entries to 1 % of the learning rate. Adam's eps is 1e-5 in these runs: with a
tiny one an entry whose gradient is all but zero is divided by its own rounding error.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdpbench.engine.config.parallel import parse_backend
from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.models.load import resolve_path
from tests.distributed.payloads.engine_proof import LENGTHS, make_batch
from tests.distributed.pool import run_on_ranks

PAYLOADS = "tests.distributed.payloads.engine_proof"
TOLERANCE = 1e-5
LEARNING_RATE = 1e-3
EPS = 1e-5
CLIP = 0.5  # below every norm of these runs, so that clipping is active
MESHES = ["d2", "t2", "c2", "d2t2", "d2c2", "c2t2", "d2c2t2", "d4", "c4"]


def make_config(model: str, mesh: str, **changes) -> dict:
    return {
        "path": model,
        "backend": f"fsdp:{mesh}",
        "dtype": "float32",
        "attn_impl": "sdpa",
        "logprobs_chunk_size": 16,
        "mb_spec": {"n_mbs": 3},
        "optimizer": {
            "lr": LEARNING_RATE,
            "eps": EPS,
            "gradient_clipping": CLIP,
            "lr_scheduler_type": "linear",
        },
        **changes,
    }


def world_size_of(mesh: str) -> int:
    return parse_backend(f"fsdp:{mesh}").strategy.world_size


def folder_of(preset: str) -> Path:
    return resolve_path(TrainEngineConfig(path=preset))


@cache
def reference(model_name: str, optimizer: str = "adam") -> dict:
    """Train with padded rows, one sequence at a time, on one process, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(
        folder_of(model_name), dtype=torch.float32, attn_implementation="eager"
    )
    model.train()
    parameters = list(model.parameters())
    if optimizer == "adam":
        algorithm = torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=EPS, foreach=False)
    else:
        algorithm = torch.optim.SGD(parameters, lr=LEARNING_RATE, weight_decay=0.01, foreach=False)
    losses, norms = [], []
    for step in range(5):
        batch = make_batch(step)
        total = batch["loss_mask"].sum()
        loss_sum = torch.zeros(())
        algorithm.zero_grad()
        for row in range(len(LENGTHS)):
            ids, mask = batch["input_ids"][row : row + 1], batch["attention_mask"][row : row + 1]
            logits = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits[0]
            logprobs = torch.log_softmax(logits[:-1].float(), dim=-1)
            picked = logprobs.gather(1, ids[0, 1:, None])[:, 0]
            loss = -(picked * batch["loss_mask"][row, 1:]).sum() / total
            loss.backward()
            loss_sum += loss.detach()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, CLIP, foreach=False).item())
        for group in algorithm.param_groups:
            group["lr"] = LEARNING_RATE * (1 - step / 5)
        algorithm.step()
        losses.append(loss_sum.item())
    weights = {name: value.detach().numpy() for name, value in model.named_parameters()}
    return {"losses": losses, "norms": norms, "weights": weights}


def check_equal(results: list[dict], expected: dict) -> None:
    for result in results:
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=TOLERANCE)
        np.testing.assert_allclose(result["norms"], expected["norms"], rtol=TOLERANCE)
    weights = results[0]["weights"]
    assert set(weights) == set(expected["weights"])
    for name, value in expected["weights"].items():
        difference = weights[name] - value
        assert np.linalg.norm(difference) <= TOLERANCE * np.linalg.norm(value), name
        assert np.abs(difference).max() <= 0.01 * LEARNING_RATE, name


@pytest.mark.parametrize(
    ("model", "mesh"),
    [("tiny-qwen3", mesh) for mesh in ("d1", *MESHES)]
    + [("tiny-llama", mesh) for mesh in ("d1", "d2", "t2", "c2", "d2t2", "c2t2")],
)
def test_training_equals_the_single_process_loop(model, mesh):
    results = run_on_ranks(
        f"{PAYLOADS}:train", world_size_of(mesh), config=make_config(model, mesh)
    )
    check_equal(results, reference(model))


MEMORY_OPTIONS = {
    "checkpointing": {"gradient_checkpointing": True},
    "offload": {"fsdp": {"offload_params": True}},
    "per-layer step": {"fsdp": {"per_layer_optim_step": True}},
    "all": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_policy": "keep_both",
        "fsdp": {
            "offload_params": True,
            "memory_efficient_load": True,
            "per_layer_optim_step": True,
            "optim_step_prefetch_layers": 0,
            "forward_prefetch_layers": 2,
            "backward_prefetch_layers": 2,
        },
    },
    "kept gathered": {"fsdp": {"reshard_after_forward": False, "memory_efficient_load": True}},
}


@pytest.mark.parametrize(
    ("mesh", "option"),
    [("d2", option) for option in MEMORY_OPTIONS] + [("c2t2", "offload"), ("c2t2", "all")],
)
def test_memory_options_change_no_number(mesh, option):
    config = make_config("tiny-qwen3", mesh, **MEMORY_OPTIONS[option])
    results = run_on_ranks(f"{PAYLOADS}:train", world_size_of(mesh), config=config)
    check_equal(results, reference("tiny-qwen3"))


def test_sgd_equals_the_single_process_loop():
    optimizer = {
        "type": "sgd",
        "lr": LEARNING_RATE,
        "gradient_clipping": CLIP,
        "lr_scheduler_type": "linear",
    }
    config = make_config("tiny-llama", "d2t2", optimizer=optimizer)
    check_equal(run_on_ranks(f"{PAYLOADS}:train", 4, config=config), reference("tiny-llama", "sgd"))


def test_two_engines_of_different_meshes_in_one_process():
    first, second = make_config("tiny-qwen3", "c2t2"), make_config("tiny-llama", "d2c2")
    results = run_on_ranks(f"{PAYLOADS}:train_two_engines", 4, first=first, second=second)
    for figures in results:
        for figure, model in zip(figures, ("tiny-qwen3", "tiny-llama"), strict=True):
            for name, values in figure.items():
                expected = reference(model)[name][:1]
                np.testing.assert_allclose(values[:1], expected, rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backend": "fsdp:d3"}, ["3", "2", "world_size"]),
        ({"backend": "fsdp:d2", "is_critic": True}, ["is_critic", "not available yet"]),
        ({"backend": "fsdp:d1t2", "path": "smollm2-135m"}, ["num_attention_heads=9"]),
        ({"backend": "fsdp:d1c2", "path": "smollm2-135m"}, ["9 attention heads"]),
    ],
    ids=["world", "unavailable", "heads", "context"],
)
def test_what_does_not_fit_is_refused(changes, words):
    config = {**make_config("tiny-llama", "d2"), **changes}
    for message in run_on_ranks(f"{PAYLOADS}:expect_error", 2, config=config):
        assert all(word in message for word in words)
