"""How new weights reach the rollout side."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from fsdpbench.engine.config.strict import Count, Flag, Positive, StrictModel, rule
from fsdpbench.errors import Violation

WeightUpdateMode = Literal["xccl", "disk"]
AWEX_REFUSAL = "awex needs a Megatron actor with SGLang rollout; the FSDP engine uses xccl or disk"


def refuse_awex(value: Any) -> Any:
    """Give the known foreign mode its reason; other values pass on to the type's own check."""
    if value == "awex":
        raise ValueError(AWEX_REFUSAL)
    return value


class WeightUpdateMeta(StrictModel):
    """How weights are sent, from `connect_engine` on."""

    type: WeightUpdateMode = "xccl"
    """Broadcast through a process group (xccl) or a Hugging Face folder (disk)."""
    path: str | None = None
    """Folder that both sides reach; its versions lie in it. disk, and xccl that falls back."""
    weight_chunked_mem_mb: Count = 1024
    """MiB of a bucket; two are in flight. xccl only."""
    wire_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Precision in which weights travel."""
    send_adapters: Flag = False
    """Send the LoRA adapters alone to an engine that takes them, instead of merged weights."""
    verify: Flag = False
    """Compare names, shapes, dtypes and a checksum of each tensor on both ends after an update."""
    in_flight: Literal["abort", "wait"] = "abort"
    """Requests that run when an update begins: abort (their client resubmits) or wait for them."""
    on_failure: Literal["raise", "disk"] = "raise"
    """After a failed xccl update: raise, or send the weights through `path` from then on."""
    timeout_seconds: Positive = 300.0
    """Limit of each exchange with a receiver; then both sides give up."""
    keep_versions: Count = 2
    """Folders of versions that stay under `path`; older ones are removed."""

    _refuse_awex = field_validator("type", mode="before")(refuse_awex)

    @rule("type", "path", "on_failure")
    def _disk_has_a_path(self) -> Violation | None:
        uses_disk = self.type == "disk" or self.on_failure == "disk"
        if uses_disk and not self.path:
            why = "type is disk" if self.type == "disk" else "on_failure is disk"
            return Violation("path", repr(self.path), f"is required when {why}")
        return None
