"""The model of a local rollout process: transformers' own class with its own attention.

It shares with the trainer no more than the reading of files, so that agreement of the two proves
something. Weights change in place; nothing else refers to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from fsdpbench.engine.device import Device
from fsdpbench.engine.models.meta import EmptyOnMeta, move_parameters_to_meta
from fsdpbench.engine.ops.logprobs import gather_logprobs
from fsdpbench.engine.parallel.bucket_reader import FileSource
from fsdpbench.engine.parallel.materialize import allocate_shards
from fsdpbench.engine.parallel.tensor import find_tied_parameters
from fsdpbench.engine.parallel.weight_buckets import plan_buckets
from fsdpbench.engine.parallel.weight_files import SafetensorsWeights
from fsdpbench.engine.parallel.weight_stream import read_buckets
from fsdpbench.engine.parallel.weight_targets import ShardTarget
from fsdpbench.engine.rollout.decoding import check_tokens, decode
from fsdpbench.engine.rollout.generation import SamplingSettings
from fsdpbench.errors import CheckpointError, list_names


class LocalModel:
    """A causal model on one device, ready to generate once weights were loaded."""

    def __init__(self, module: PreTrainedModel, device: Device) -> None:
        self.module, self.device = module, device
        self.live: dict[str, torch.Tensor] = {
            name: parameter.data for name, parameter in module.named_parameters()
        }
        self.aliases = {
            name: first for first, *others in find_tied_parameters(module) for name in others
        }

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a sequence, as the model's files say."""
        ids = getattr(self.module.generation_config, "eos_token_id", None)
        if ids is None:
            return frozenset()
        return frozenset(ids if isinstance(ids, list) else [ids])

    def plan_load(self, folder: Path) -> Callable[[], None]:
        """Check a Hugging Face folder against the model and return the call that reads it.

        Raises CheckpointError with nothing changed. Values are cast to the model's dtype.
        """
        weights = SafetensorsWeights(folder)
        weights.check_names({name: tensor.shape for name, tensor in self.live.items()})
        unused = weights.find_unused({*self.live, *self.aliases})
        if unused:
            raise CheckpointError(
                f"{folder}: the model has no place for {list_names(unused)}. "
                "The weights belong to another model."
            )
        spans = [
            weights.locate_rows(name, slice(0, tensor.shape[0] if tensor.ndim else 1))
            for name, tensor in self.live.items()
        ]
        buckets = plan_buckets(spans)

        @torch.no_grad()
        def load() -> None:
            targets = {name: ShardTarget(tensor) for name, tensor in self.live.items()}
            read_buckets(buckets, FileSource(), targets, self.device)
            self.device.synchronize()

        return load

    def generate(
        self,
        requests: Sequence[Mapping[str, Any]],
        settings: SamplingSettings,
        is_interrupted: Callable[[], bool],
    ) -> list[dict[str, Any]]:
        """Generate; return tokens, log-probs and the reason of the end for each request."""
        ids = settings.stop_token_ids
        stop_ids = self.stop_ids if ids is None else frozenset(ids)
        return [
            {
                "tokens": sequence.new_tokens,
                "logprobs": sequence.logprobs,
                "finish_reason": sequence.finish_reason,
            }
            for sequence in decode(self.module, requests, settings, stop_ids, is_interrupted)
        ]

    @torch.inference_mode()
    def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log p(token | tokens before it) of each token but the first, per sequence."""
        check_tokens(self.module, sequences)
        results: list[list[float]] = []
        for tokens in sequences:
            ids = torch.tensor([tokens], device=self.device.torch_device)
            logits = self.module(input_ids=ids, use_cache=False).logits[0, :-1]
            results.append(gather_logprobs(logits, ids[0, 1:]).tolist())
        return results


def build_local_model(folder: Path, dtype: str, device: Device) -> LocalModel:
    """Build the model that a folder's config.json describes, with memory but no weights yet."""
    try:
        hf_config = AutoConfig.from_pretrained(folder)
        with EmptyOnMeta():
            module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                hf_config, dtype=getattr(torch, dtype), attn_implementation="sdpa"
            )
        if (folder / "generation_config.json").is_file():
            module.generation_config = GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} holds no model that can be built: {error}") from error
    move_parameters_to_meta(module)
    allocate_shards(module, device)
    module.to(device.torch_device)  # buffers; parameters are there
    return LocalModel(module.eval().requires_grad_(False), device)
