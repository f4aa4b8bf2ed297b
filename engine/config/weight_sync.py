"""How new weights reach the rollout side."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from fsdpbench.engine.config.strict import StrictModel, rule
from fsdpbench.errors import Violation

WeightUpdateMode = Literal["xccl", "disk"]
AWEX_REFUSAL = "awex needs a Megatron actor with SGLang rollout; the FSDP engine uses xccl or disk"


def refuse_awex(value: Any) -> Any:
    """Give the known foreign mode its reason; other values pass on to the type's own check."""
    if value == "awex":
        raise ValueError(AWEX_REFUSAL)
    return value


class WeightUpdateMeta(StrictModel):
    """One weight update."""

    type: WeightUpdateMode = "xccl"
    """Broadcast through a process group (xccl) or a Hugging Face folder (disk)."""
    path: str | None = None
    """Folder that both sides reach; disk only."""

    _refuse_awex = field_validator("type", mode="before")(refuse_awex)

    @rule("type", "path")
    def _disk_has_a_path(self) -> Violation | None:
        if self.type == "disk" and not self.path:
            return Violation("path", repr(self.path), "is required when type is disk")
        return None
