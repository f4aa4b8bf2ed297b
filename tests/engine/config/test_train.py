"""Defaults of the engine configuration as the guide fixes them, and every rule over its fields."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fsdpbench.engine.config.fsdp import FSDPEngineConfig
from fsdpbench.engine.config.parallel import FSDPParallelStrategy
from fsdpbench.engine.config.train import FinetuneSpec, TrainEngineConfig
from fsdpbench.errors import ConfigError

GUIDE_DEFAULTS = {
    "path": "",
    "attn_impl": "flash_attention_2",
    "init_from_scratch": False,
    "is_critic": False,
    "logprobs_chunk_size": 1024,
    "pad_to_maximum": False,
    "disable_dropout": False,
    "gradient_checkpointing": False,
    "gradient_checkpointing_policy": "full",
    "dtype": "bfloat16",
    "grad_reduce_dtype": "float32",
    "optimizer_dtype": "float32",
    "optimizer": None,
    "weight_update_mode": "xccl",
    "use_lora": False,
    "lora_rank": 32,
    "lora_alpha": 16,
    "target_modules": (),
    "enable_tree_training": False,
    "temperature": 1.0,
    "backend": "",
    "seed": 1,
    "trust_remote_code": False,
}


@pytest.mark.parametrize(("field", "value"), GUIDE_DEFAULTS.items(), ids=GUIDE_DEFAULTS)
def test_defaults(field, value):
    assert getattr(TrainEngineConfig(), field) == value


def test_there_are_no_other_fields():
    assert set(TrainEngineConfig.model_fields) == {*GUIDE_DEFAULTS, "mb_spec", "fsdp"}
    assert TrainEngineConfig().fsdp == FSDPEngineConfig()


ADAM = {"type": "adam"}
REFUSED = {
    "bf16 masters under fp32": (
        {
            "dtype": "float32",
            "optimizer_dtype": "bfloat16",
            "optimizer": {"type": "adam_bf16"},
        },
        {"optimizer_dtype"},
    ),
    "bf16 reduction under fp32": (
        {"dtype": "float32", "grad_reduce_dtype": "bfloat16", "optimizer": {}},
        {"grad_reduce_dtype"},
    ),
    "kept attention of many operators": (
        {
            "gradient_checkpointing": True,
            "gradient_checkpointing_policy": "keep_both",
            "attn_impl": "eager",
        },
        {"gradient_checkpointing_policy"},
    ),
    "load without weights": (
        {"init_from_scratch": True, "fsdp": {"memory_efficient_load": True}},
        {"fsdp.memory_efficient_load"},
    ),
    "per-layer step for inference": (
        {"fsdp": {"per_layer_optim_step": True}},
        {"fsdp.per_layer_optim_step"},
    ),
    "per-layer step with sgd": (
        {"fsdp": {"per_layer_optim_step": True}, "optimizer": {"type": "sgd"}},
        {"fsdp.per_layer_optim_step"},
    ),
    "per-layer step with adam_bf16": (
        {"fsdp": {"per_layer_optim_step": True}, "optimizer": {"type": "adam_bf16"}},
        {"fsdp.per_layer_optim_step"},
    ),
    "negative prefetch": (
        {"fsdp": {"optim_step_prefetch_layers": -1}},
        {"fsdp.optim_step_prefetch_layers"},
    ),
    "bf16 masters with adam": (
        {"optimizer_dtype": "bfloat16", "optimizer": ADAM},
        {"optimizer_dtype"},
    ),
    "bf16 masters with sgd": (
        {"optimizer_dtype": "bfloat16", "optimizer": {"type": "sgd"}},
        {"optimizer_dtype"},
    ),
    "training in fp16": ({"dtype": "float16", "optimizer": ADAM}, {"dtype"}),
    "trees over context parallel": (
        {"enable_tree_training": True, "backend": "fsdp:d2c2"},
        {"enable_tree_training"},
    ),
    "padding to no length": ({"pad_to_maximum": True}, {"pad_to_maximum"}),
    "awex": ({"weight_update_mode": "awex"}, {"weight_update_mode"}),
    "pipeline": ({"backend": "fsdp:d2p2"}, {"backend"}),
    "experts": ({"backend": "fsdp:d2e2"}, {"backend"}),
    "unknown engine": ({"backend": "megatron:d2"}, {"backend"}),
    "unknown attention": ({"attn_impl": "flash"}, {"attn_impl"}),
    "twice the same module": ({"target_modules": ["q_proj", "q_proj"]}, {"target_modules"}),
    "unknown dtype": ({"dtype": "bf16"}, {"dtype"}),
    "fp16 reduction": ({"grad_reduce_dtype": "float16"}, {"grad_reduce_dtype"}),
    "no temperature": ({"temperature": 0}, {"temperature"}),
    "no chunk": ({"logprobs_chunk_size": 0}, {"logprobs_chunk_size"}),
}


@pytest.mark.parametrize(("values", "where"), REFUSED.values(), ids=REFUSED)
def test_refusals(values, where):
    with pytest.raises(ConfigError) as caught:
        TrainEngineConfig(**values)
    assert {violation.where for violation in caught.value.violations} == where


def test_all_refusals_at_once():
    with pytest.raises(ConfigError) as caught:
        TrainEngineConfig(
            init_from_scratch=True,
            fsdp={
                "memory_efficient_load": True,
                "per_layer_optim_step": True,
                "optim_step_prefetch_layers": -3,
                "ofload_params": True,
            },
            optimizer={"type": "sgd", "lr": "fast"},
            optimizer_dtype="bfloat16",
            weight_update_mode="awex",
            backend="fsdp:d2p2",
            pad_to_maximum=True,
            mb_spec={"n_mbs": 0},
        )
    assert sorted(violation.where for violation in caught.value.violations) == [
        "backend",
        "fsdp.memory_efficient_load",
        "fsdp.ofload_params",
        "fsdp.optim_step_prefetch_layers",
        "fsdp.per_layer_optim_step",
        "mb_spec.n_mbs",
        "optimizer.lr",
        "optimizer_dtype",
        "pad_to_maximum",
        "weight_update_mode",
    ]


ACCEPTED = {
    "per-layer step with adam": {"fsdp": {"per_layer_optim_step": True}, "optimizer": ADAM},
    "bf16 masters with Kahan sums": {
        "optimizer_dtype": "bfloat16",
        "optimizer": {"type": "adam_bf16"},
    },
    "bf16 moments over fp32 masters": {"optimizer": {"type": "adam_bf16"}},
    "bf16 weights for inference": {"optimizer_dtype": "bfloat16"},
    "inference in fp16": {"dtype": "float16"},
    "trees without context parallel": {"enable_tree_training": True, "backend": "fsdp:d2t2"},
    "padding": {"pad_to_maximum": True, "mb_spec": {"max_tokens_per_mb": 64}},
    "disk": {"weight_update_mode": "disk"},
    "hub kernel": {"attn_impl": "kernels-community/flash-attn@v1:flash_attn_varlen_func"},
    "auto": {"attn_impl": "auto"},
}


@pytest.mark.parametrize("values", ACCEPTED.values(), ids=ACCEPTED)
def test_acceptances(values):
    config = TrainEngineConfig(**values)
    assert TrainEngineConfig.model_validate(config.model_dump(mode="json")) == config


def test_backend_gives_the_strategy():
    assert TrainEngineConfig().parallel_strategy is None
    assert TrainEngineConfig().context_parallel_size == 1
    config = TrainEngineConfig(backend="fsdp:d2c4t2")
    assert config.context_parallel_size == 4
    assert config.parallel_strategy == FSDPParallelStrategy(
        data_parallel_size=2, context_parallel_size=4, tensor_parallel_size=2
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, False),
        ({"fsdp": {"memory_efficient_load": True}}, True),
        ({"use_lora": True}, True),
        ({"use_lora": True, "init_from_scratch": True}, False),
    ],
)
def test_broadcast_of_weights(values, expected):
    assert TrainEngineConfig(**values).broadcasts_weights is expected


def test_frozen_weights_are_kept_as_they_are_computed_with():
    assert TrainEngineConfig().weights_dtype == "float32"
    assert TrainEngineConfig(use_lora=True).weights_dtype == "bfloat16"


def test_lora_scaling():
    assert TrainEngineConfig(lora_rank=8, lora_alpha=24).lora_scaling == 3.0


@pytest.mark.parametrize(
    ("epochs", "samples", "batch", "steps"), [(1, 8, 8, 1), (3, 100, 8, 36), (2, 15, 8, 2)]
)
def test_finetune_spec_counts_full_batches(epochs, samples, batch, steps):
    spec = FinetuneSpec(total_train_epochs=epochs, dataset_size=samples, train_batch_size=batch)
    assert spec.total_train_steps == steps
    assert spec.total_train_steps == epochs * spec.steps_per_epoch


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"dataset_size": 4, "train_batch_size": 8}, {"total_train_epochs", "train_batch_size"}),
        (
            {"total_train_epochs": 0, "dataset_size": 4, "train_batch_size": 8},
            {"total_train_epochs", "train_batch_size"},
        ),
    ],
)
def test_finetune_spec_needs_one_batch(values, where):
    with pytest.raises(ConfigError) as caught:
        FinetuneSpec(**values)
    assert {violation.where for violation in caught.value.violations} == where


def test_no_module_of_the_package_imports_torch():
    modules = (
        "strict parallel optimizer batching fsdp checkpoint weight_sync tracing train run load "
        "describe availability"
    )
    names = [f"fsdpbench.engine.config.{name}" for name in modules.split()]
    names += [f"fsdpbench.engine.models.{name}" for name in ("presets", "families", "facts")]
    names.append("fsdpbench.engine.topology")
    code = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
