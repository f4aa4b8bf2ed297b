"""From an engine's parts to the sender of its weights: what travels, and where it is written.

The one place that joins a model, its checkpoints and `weight_sync`, which do not know each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fsdpbench.engine.checkpoint.adapter_folder import name_base_model, write_adapter_files
from fsdpbench.engine.checkpoint.hf import write_model
from fsdpbench.engine.models.export import iterate_gathered_parameters
from fsdpbench.engine.parallel.adapters import iterate_adapter_parameters
from fsdpbench.engine.parallel.agreement import Agreement
from fsdpbench.engine.weight_sync.disk import DiskChannel
from fsdpbench.engine.weight_sync.groups import LOOPBACK
from fsdpbench.engine.weight_sync.source import (
    SourceModel,
    describe_source,
    iterate_whole_tensors,
)
from fsdpbench.engine.weight_sync.update import WeightUpdater
from fsdpbench.errors import ConfigError, Violation

if TYPE_CHECKING:
    from fsdpbench.engine.config.weight_sync import WeightUpdateMeta
    from fsdpbench.engine.protocols import InferenceEngine
    from fsdpbench.engine.setup import EngineParts


def build_updater(
    parts: EngineParts,
    engines: Sequence[InferenceEngine],
    meta: WeightUpdateMeta,
    *,
    host: str = LOOPBACK,
) -> WeightUpdater:
    """Build what carries this engine's weights to rollout engines; `connect` comes next.

    Raises ConfigError when adapters are to be sent and there are none. Only rank 0 needs `engines`.
    """
    if meta.send_adapters and parts.model.adapters is None:
        allowed = "needs an engine with adapters"
        remedy = "set use_lora to true, or send_adapters to false"
        raise ConfigError([Violation("send_adapters", "True", allowed, remedy)])
    return WeightUpdater(
        engines,
        meta,
        describe_weights(parts, meta),
        parts.device,
        group=parts.meshes.cpu_group,
        publish=build_publisher(parts, meta),
        host=host,
    )


def describe_weights(parts: EngineParts, meta: WeightUpdateMeta) -> SourceModel:
    """Describe what travels: the adapters alone, or all weights with adapters merged."""
    model, facts = parts.model, parts.model.facts
    adapters = meta.send_adapters
    named = model.named_adapter_parameters() if adapters else model.named_hf_parameters()
    return describe_source(
        named,
        meta.wire_dtype,
        num_layers=facts.num_layers,
        is_tied=facts.tie_word_embeddings and not adapters,
        family=facts.model_type,
        adapters_only=adapters,
    )


def walk_weights(
    parts: EngineParts, meta: WeightUpdateMeta
) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    """Return what begins a walk over the whole tensors, in the order of `describe_weights`.

    Collective over: the world, each step of the walk.
    """
    model, device = parts.model, parts.device
    dtype = getattr(torch, meta.wire_dtype)
    if meta.send_adapters:
        return lambda: iterate_whole_tensors(model.named_adapter_parameters(), device, dtype)
    if model.adapters is not None:
        return lambda: iterate_gathered_parameters(model, device, dtype)
    return lambda: iterate_whole_tensors(model.named_hf_parameters(), device, dtype)


def build_publisher(parts: EngineParts, meta: WeightUpdateMeta) -> Callable[[int], Path] | None:
    """Return what writes and announces one version under `meta.path`; None without a path.

    Calls of it are collective over the world.
    """
    if meta.path is None:
        return None
    channel = DiskChannel(meta.path, keep_versions=meta.keep_versions, group=parts.meshes.cpu_group)
    dtype = getattr(torch, meta.wire_dtype)
    source = describe_weights(parts, meta)
    num_bytes = sum(spec.num_bytes for spec in source.specs)

    def write(folder: Path) -> None:
        if meta.send_adapters:
            write_adapters(parts, folder, dtype)
        else:
            write_model(parts, folder, dtype, durable=False)  # readers share the page cache

    return lambda version: channel.publish(version, write, num_bytes)


def write_adapters(parts: EngineParts, folder: Path, dtype: torch.dtype) -> None:
    """Fill an existing folder with the adapters in peft's format. Collective over: the world."""
    settings = parts.model.adapters
    assert settings is not None  # `build_updater` has refused the rest
    walk = iterate_adapter_parameters(parts.model, parts.meshes, parts.device, dtype)
    tensors = {name: whole for name, whole in walk if whole is not None}
    with Agreement("weight update", parts.meshes.cpu_group):
        if parts.meshes.rank == 0:
            base_model = name_base_model(parts.config.path, parts.source)
            write_adapter_files(folder, tensors, settings, base_model)
