"""Where and how a model is saved or loaded."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fsdpbench.engine.config.strict import Flag, StrictModel, rule
from fsdpbench.errors import Violation

WeightFormat = Literal["hf", "dcp", "adapter"]


class SaveLoadMeta(StrictModel):
    """One save or load."""

    path: Annotated[str, Field(min_length=1)]
    """Folder to write or read."""
    weight_format: WeightFormat = "hf"
    """A Hugging Face folder, torch's sharded checkpoint, or the adapters alone as peft has them."""
    with_optim: Flag = False
    """Also optimizer, schedule, version and random state; not with adapter."""
    asynchronous: Flag = False
    """Let training go on while files are written; save with dcp only."""

    @rule("weight_format", "with_optim")
    def _adapters_have_no_optimizer(self) -> Violation | None:
        if not (self.with_optim and self.weight_format == "adapter"):
            return None
        return Violation(
            "with_optim",
            "True",
            "a folder of adapters holds weights alone",
            "set weight_format to dcp or hf, or with_optim to false",
        )

    @rule("weight_format", "asynchronous")
    def _only_dcp_saves_in_the_background(self) -> Violation | None:
        if not self.asynchronous or self.weight_format == "dcp":
            return None
        return Violation(
            "asynchronous",
            "True",
            f"weight_format {self.weight_format!r} is written while training waits",
            "set weight_format to dcp, or asynchronous to false",
        )
