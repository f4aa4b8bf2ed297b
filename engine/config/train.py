"""The configuration of one training engine, and of the run length that its schedule needs.

Rules over two sections live here, in the class that holds both. What needs the world size or the
model is checked by `fsdpbench.engine.topology`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, field_validator

from fsdpbench.engine.config.batching import MicroBatchSpec
from fsdpbench.engine.config.fsdp import FSDPEngineConfig
from fsdpbench.engine.config.optimizer import OptimizerConfig
from fsdpbench.engine.config.parallel import FSDPParallelStrategy, parse_backend
from fsdpbench.engine.config.strict import Count, Flag, NonNegativeInt, Positive, StrictModel, rule
from fsdpbench.engine.config.weight_sync import WeightUpdateMode, refuse_awex
from fsdpbench.errors import ConfigError, Violation

ATTENTION_NAMES = (
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "sdpa",
    "eager",
    "auto",
)
CheckpointingPolicy = Literal["full", "keep_attention", "keep_matmul", "keep_both"]
HUB_KERNEL = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<function>\w+))?")


class TrainEngineConfig(StrictModel):
    """One engine: the model, its precision, its step and how it is spread over the ranks."""

    backend: str = ""
    """Engine and degrees, as `fsdp:d4c2t1`; empty means data parallel over the whole world."""
    path: str = ""
    """Model: a preset name, a local Hugging Face folder or a hub id."""
    attn_impl: str = "flash_attention_2"
    """Attention of transformers by name, or a hub kernel `org/repo[@revision][:function]`."""
    init_from_scratch: Flag = False
    """Random weights instead of those at path, the same for every mesh."""
    is_critic: Flag = False
    """A value head instead of the language-model head."""
    logprobs_chunk_size: Count = 1024
    """Tokens whose logits exist at once when log-probabilities and entropy are computed."""
    temperature: Positive = 1.0
    """Logits are divided by this before log-probabilities and entropy."""
    mb_spec: MicroBatchSpec = Field(default_factory=MicroBatchSpec)
    """How a batch is cut into micro-batches."""
    pad_to_maximum: Flag = False
    """Pad every micro-batch to max_tokens_per_mb: steadier memory, slower."""
    disable_dropout: Flag = False
    """Switch dropout off while training."""
    gradient_checkpointing: Flag = False
    """Recompute each layer in the backward pass: less memory, more time."""
    gradient_checkpointing_policy: CheckpointingPolicy = "full"
    """What checkpointing keeps: nothing (full), or the outputs of attention, matmuls or both."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Precision of forward and backward."""
    grad_reduce_dtype: Literal["bfloat16", "float32"] = "float32"
    """Precision in which gradients are reduced over the ranks."""
    optimizer_dtype: Literal["bfloat16", "float32"] = "float32"
    """Precision of master weights and optimizer states; bfloat16 needs optimizer.type adam_bf16."""
    optimizer: OptimizerConfig | None = None
    """How weights are updated; None builds an engine for inference only."""
    weight_update_mode: WeightUpdateMode = "xccl"
    """How new weights reach the rollout side."""
    fsdp: FSDPEngineConfig = Field(default_factory=FSDPEngineConfig)
    """Settings of FSDP2 itself."""
    use_lora: Flag = False
    """Train low-rank adapters and keep the base weights frozen."""
    lora_rank: Count = 32
    """Rank of the adapters."""
    lora_alpha: Count = 16
    """Adapters are scaled by lora_alpha / lora_rank."""
    target_modules: tuple[str, ...] = ()
    """Modules that get adapters; empty means every linear layer."""
    enable_tree_training: Flag = False
    """Share the common prefixes of sequences as a tree; not with context parallel."""
    seed: NonNegativeInt = 1
    """Seed of random weights and dropout."""
    trust_remote_code: Flag = False
    """Run model code that lies beside the weights."""

    _refuse_awex = field_validator("weight_update_mode", mode="before")(refuse_awex)

    @field_validator("backend")
    @classmethod
    def _backend_parses(cls, value: Any) -> Any:
        if value:
            try:
                parse_backend(value)
            except ConfigError as error:  # the parent adds the field's path
                raise ConfigError([replace(v, where="") for v in error.violations]) from None
        return value

    @property
    def parallel_strategy(self) -> FSDPParallelStrategy | None:
        """The degrees of `backend`; None when it is empty."""
        return parse_backend(self.backend).strategy if self.backend else None

    @property
    def context_parallel_size(self) -> int:
        """Ranks that share a sequence; 1 when `backend` is empty."""
        strategy = self.parallel_strategy
        return strategy.cp_size if strategy else 1

    @property
    def broadcasts_weights(self) -> bool:
        """Whether rank 0 alone reads the weights and sends every rank its part."""
        wanted = self.fsdp.memory_efficient_load or self.use_lora
        return wanted and not self.init_from_scratch

    @property
    def weights_dtype(self) -> str:
        """Precision in which the model's own weights are kept: what is frozen needs no more."""
        return self.dtype if self.use_lora else self.optimizer_dtype

    @property
    def lora_scaling(self) -> float:
        """Factor of the adapters' output."""
        return self.lora_alpha / self.lora_rank

    @rule("attn_impl")
    def _attention_is_known(self) -> Violation | None:
        if self.attn_impl in ATTENTION_NAMES or HUB_KERNEL.fullmatch(self.attn_impl):
            return None
        return Violation(
            "attn_impl",
            repr(self.attn_impl),
            f"must be one of {', '.join(ATTENTION_NAMES)}",
            "or a hub kernel, org/repo[@revision][:function]",
        )

    @rule("target_modules")
    def _target_modules_are_distinct_names(self) -> Violation | None:
        names = self.target_modules
        if all(names) and len(set(names)) == len(names):
            return None
        return Violation("target_modules", repr(list(names)), "must be distinct module names")

    @rule("fsdp.memory_efficient_load", "init_from_scratch")
    def _nothing_to_broadcast(self) -> Violation | None:
        if not (self.fsdp.memory_efficient_load and self.init_from_scratch):
            return None
        return Violation(
            "fsdp.memory_efficient_load",
            "True",
            "loads weights, and init_from_scratch=True has none to load",
            "set one of the two to false",
        )

    @rule("fsdp.per_layer_optim_step", "optimizer.type")
    def _per_layer_step_is_adam(self) -> Violation | None:
        if not self.fsdp.per_layer_optim_step:
            return None
        found = self.optimizer.type if self.optimizer else None
        if found == "adam":
            return None
        return Violation(
            "fsdp.per_layer_optim_step",
            "True",
            f"needs optimizer.type 'adam', found {found!r}",
            "set optimizer.type to adam, or fsdp.per_layer_optim_step to false",
        )

    @rule("optimizer_dtype", "optimizer.type")
    def _bf16_weights_need_kahan(self) -> Violation | None:
        if self.optimizer is None or self.optimizer_dtype != "bfloat16":
            return None
        if self.optimizer.type == "adam_bf16":
            return None
        return Violation(
            "optimizer_dtype",
            "'bfloat16'",
            f"with optimizer.type {self.optimizer.type!r} small updates are rounded away",
            "set optimizer.type to adam_bf16 (Kahan summation), or optimizer_dtype to float32",
        )

    @rule("dtype", "optimizer_dtype", "optimizer")
    def _masters_are_as_wide_as_computation(self) -> Violation | None:
        narrow = self.optimizer_dtype == "bfloat16" and self.dtype == "float32"
        if self.optimizer is None or not narrow:
            return None
        return Violation(
            "optimizer_dtype",
            "'bfloat16'",
            "weights kept in bfloat16 gain nothing from dtype 'float32'",
            "set dtype to bfloat16, or optimizer_dtype to float32",
        )

    @rule("dtype", "grad_reduce_dtype", "optimizer")
    def _gradients_are_reduced_as_wide_as_made(self) -> Violation | None:
        narrow = self.grad_reduce_dtype == "bfloat16" and self.dtype == "float32"
        if self.optimizer is None or not narrow:
            return None
        return Violation(
            "grad_reduce_dtype",
            "'bfloat16'",
            "rounds the gradients that dtype 'float32' computes",
            "set grad_reduce_dtype to float32, or dtype to bfloat16",
        )

    @rule("gradient_checkpointing_policy", "gradient_checkpointing", "attn_impl")
    def _kept_attention_is_one_operator(self) -> Violation | None:
        keeps = self.gradient_checkpointing_policy in ("keep_attention", "keep_both")
        if not (self.gradient_checkpointing and keeps and self.attn_impl == "eager"):
            return None
        return Violation(
            "gradient_checkpointing_policy",
            repr(self.gradient_checkpointing_policy),
            "attn_impl 'eager' is many operators, none of which is attention",
            "use keep_matmul or full, or another attn_impl",
        )

    @rule("enable_tree_training", "backend")
    def _trees_have_one_context_rank(self) -> Violation | None:
        if not self.enable_tree_training or self.context_parallel_size == 1:
            return None
        return Violation(
            "enable_tree_training",
            "True",
            f"excludes context parallel, found c{self.context_parallel_size} in backend",
            "set c1, or enable_tree_training to false",
        )

    @rule("dtype", "optimizer")
    def _half_precision_needs_loss_scaling(self) -> Violation | None:
        if self.dtype != "float16" or self.optimizer is None:
            return None
        return Violation(
            "dtype",
            "'float16'",
            "gradients underflow in float16 and this engine scales no losses",
            "train in bfloat16 or float32; float16 serves inference (optimizer: null)",
        )

    @rule("pad_to_maximum", "mb_spec.max_tokens_per_mb")
    def _padding_has_a_target(self) -> Violation | None:
        if not self.pad_to_maximum or self.mb_spec.max_tokens_per_mb is not None:
            return None
        return Violation(
            "pad_to_maximum",
            "True",
            "needs mb_spec.max_tokens_per_mb as the length to pad to",
            "set mb_spec.max_tokens_per_mb, or pad_to_maximum to false",
        )


class FinetuneSpec(StrictModel):
    """Length of a run, from which the schedule's number of steps follows."""

    total_train_epochs: Count
    """Passes over the data set."""
    dataset_size: Count
    """Samples in one pass."""
    train_batch_size: Count
    """Samples of one step, over all ranks."""

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in one pass; the rest is dropped."""
        return self.dataset_size // self.train_batch_size

    @property
    def total_train_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.total_train_epochs * self.steps_per_epoch

    @rule("dataset_size", "train_batch_size")
    def _one_batch_at_least(self) -> Violation | None:
        if self.train_batch_size <= self.dataset_size:
            return None
        return Violation(
            "train_batch_size",
            str(self.train_batch_size),
            f"must not exceed dataset_size={self.dataset_size}",
        )
