"""What the engine trains: a causal language model that answers with log-probabilities.

`PolicyModel` is the root of FSDP2, so its forward is where the embedding, the last norm and the
head are gathered. Only token ids and positions pass through it: FSDP2 casts floating inputs to the
compute dtype, which would round counts and weights of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from fsdpbench.engine.models.facts import ModelFacts
from fsdpbench.engine.models.lora import AdapterSettings
from fsdpbench.engine.ops.logprobs import fused_logprobs
from fsdpbench.engine.parallel.adapters import (
    is_adapter_name,
    name_in_adapter_file,
    name_without_adapter,
)
from fsdpbench.engine.parallel.attention import CPU_FLASH, AttentionContext
from fsdpbench.engine.parallel.attention_kernels import AttentionKernel
from fsdpbench.engine.parallel.sequence import gather_sequence

BACKBONE = "backbone"


class PolicyModel(nn.Module):
    """A causal model of transformers under a head that never makes whole logits."""

    def __init__(
        self,
        backbone: PreTrainedModel,
        facts: ModelFacts,
        *,
        logprobs_chunk_size: int,
        initial_values: Mapping[str, torch.Tensor],
        adapters: AdapterSettings | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.facts = facts
        self.logprobs_chunk_size = logprobs_chunk_size
        self.initial_values = initial_values  # of norm weights, for weights from scratch
        self.adapters = adapters  # None: all weights are trained
        self.attention_kernel: AttentionKernel = CPU_FLASH  # chosen when the model is parallelized

    @property
    def initializer_range(self) -> float:
        """Standard deviation of random matrices."""
        return getattr(self.backbone.config, "initializer_range", None) or 0.02

    @property
    def attention_dropout(self) -> float:
        """Probability with which attention weights are dropped in training."""
        return getattr(self.backbone.config, "attention_dropout", None) or 0.0

    @property
    def head_weight(self) -> nn.Parameter:
        """The weight [vocabulary, hidden] that makes logits; read past its module's forward."""
        return self.backbone.get_parameter(f"{self.facts.family.head}.weight")

    def named_hf_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters under their names in a Hugging Face checkpoint; tied ones once.

        Those of adapters, which such a checkpoint lacks, are left out.
        """
        for name, parameter in self.named_parameters():
            if not is_adapter_name(name):
                yield self.name_in_checkpoint(name), parameter

    def named_adapter_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the adapters' parameters under their names in peft's files."""
        for name, parameter in self.named_parameters():
            if is_adapter_name(name):
                yield name_in_adapter_file(name.removeprefix(f"{BACKBONE}.")), parameter

    def named_trainable_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what an optimizer updates: the adapters if there are any, else all weights."""
        yield from (self.named_adapter_parameters if self.adapters else self.named_hf_parameters)()

    @staticmethod
    def name_in_checkpoint(name: str) -> str:
        """Return what a Hugging Face checkpoint calls this parameter or buffer of ours."""
        return name_without_adapter(name.removeprefix(f"{BACKBONE}."))

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        labels: torch.Tensor,
        context: AttentionContext,
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log p(labels) and the entropy, fp32 [S], of this rank's S tokens of a packed row.

        input_ids and position_ids [1, S], labels [S] with -100 for "none". S is the same on all
        ranks of a tp group and a multiple of its size. Results are equal over tp.
        Collective over: fsdp, cp and tp, so ranks must call it equally often.
        """
        decoder = self.backbone.get_submodule(self.facts.family.base_model)
        hidden = decoder(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=False,
            attention_context=context,
        ).last_hidden_state[0]
        weight: torch.Tensor = self.head_weight
        tp_group, vocab_start = None, 0
        if isinstance(weight, DTensor):  # vocabulary rows over tp, hidden states over the sequence
            tp_group = weight.device_mesh.get_group()
            weight = weight.to_local()
            vocab_start = tp_group.rank() * weight.shape[0]
            hidden = gather_sequence(hidden, tp_group, dim=0)
        return fused_logprobs(
            hidden,
            weight,
            labels,
            temperature=temperature,
            chunk_size=self.logprobs_chunk_size,
            tp_group=tp_group,
            vocab_start=vocab_start,
            with_entropy=with_entropy,
            logit_softcap=self.facts.final_logit_softcapping,
        )
