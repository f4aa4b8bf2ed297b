"""Whether the rollout engines can take what is to be sent, asked before anything is."""

from __future__ import annotations

from collections.abc import Sequence

from fsdpbench.engine.config.weight_sync import WeightUpdateMeta
from fsdpbench.engine.protocols import InferenceEngine
from fsdpbench.engine.weight_sync.source import SourceModel
from fsdpbench.errors import WeightSyncError
from fsdpbench.log import get_logger, warn_once

logger = get_logger(__name__)


def check_traits(
    engines: Sequence[InferenceEngine],
    meta: WeightUpdateMeta,
    source: SourceModel,
    *,
    mode: str,
    can_publish: bool,
) -> None:
    """Raise WeightSyncError with all that does not fit; warn of what cannot be verified."""
    problems = []
    if not can_publish and "disk" in (mode, meta.on_failure):
        problems.append("weights go to disk, but the trainer was given no way to write them")
    for index, engine in enumerate(engines):
        traits = engine.traits
        label = f"receiver {index} ({traits.dialect})"
        if mode not in traits.channels:
            problems.append(f"{label} takes {', '.join(traits.channels)}, not {mode}")
        if source.adapters_only and not traits.takes_adapters:
            problems.append(f"{label} takes no adapters alone; unset send_adapters to merge them")
        if mode == "xccl" and not 1 <= traits.pipeline_size <= source.num_layers:
            problems.append(
                f"{label} has {traits.pipeline_size} pipeline stages; a model of "
                f"{source.num_layers} layers has 1..{source.num_layers}"
            )
        if meta.verify and not traits.gives_digests:
            warn_once(
                logger,
                f"verify: {label} tells no digests; only its version and answers are checked",
            )
    if mode == "xccl":
        layouts = {(e.traits.dialect, e.traits.pipeline_size) for e in engines}
        if len(layouts) > 1 and any(size > 1 for _, size in layouts):
            shown = ", ".join(f"{dialect} with {size} stages" for dialect, size in sorted(layouts))
            problems.append(
                f"receivers divide the layers differently ({shown}); use one kind, or disk"
            )
        if len({engine.traits.joins_by_id for engine in engines}) > 1:
            shown = ", ".join(sorted({engine.traits.dialect for engine in engines}))
            problems.append(
                f"{shown} join groups in different ways (vllm by an NCCL id, others through a "
                "store); use one kind, or disk"
            )
    if problems:
        raise WeightSyncError("weight update: " + "; ".join(problems))
