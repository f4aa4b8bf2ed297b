"""Where and how a model is saved or loaded."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fsdpbench.engine.config.strict import Flag, StrictModel, rule
from fsdpbench.errors import Violation


class SaveLoadMeta(StrictModel):
    """One save or load."""

    path: Annotated[str, Field(min_length=1)]
    """Folder to write or read."""
    weight_format: Literal["hf", "dcp"] = "hf"
    """Hugging Face safetensors (weights alone) or torch's sharded checkpoint."""
    with_optim: Flag = False
    """Also the optimizer and scheduler states; dcp only."""

    @rule("weight_format", "with_optim")
    def _hf_has_no_optimizer(self) -> Violation | None:
        if not (self.with_optim and self.weight_format == "hf"):
            return None
        return Violation(
            "with_optim",
            "True",
            "a Hugging Face folder holds weights alone",
            "set weight_format to dcp, or with_optim to false",
        )
