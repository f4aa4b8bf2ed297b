"""Saving and loading an engine's parts in the format that is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdpbench.engine.checkpoint.adapter_folder import load_adapter, save_adapter
from fsdpbench.engine.checkpoint.dcp import load_dcp, save_dcp
from fsdpbench.engine.checkpoint.hf import load_hf, save_hf

if TYPE_CHECKING:
    from fsdpbench.engine.config.checkpoint import SaveLoadMeta
    from fsdpbench.engine.setup import EngineParts


def save_checkpoint(parts: EngineParts, meta: SaveLoadMeta, version: int) -> None:
    """Write a checkpoint and return when it is on the disk. Collective over: the world.

    A checkpoint of ours at `meta.path` is replaced in one step; anything else there is refused.
    The file `latest` beside it then names the new one. `meta.asynchronous` is for `AsyncSaves`.
    """
    save = {"dcp": save_dcp, "hf": save_hf, "adapter": save_adapter}[meta.weight_format]
    save(parts, meta, version)


def load_checkpoint(parts: EngineParts, meta: SaveLoadMeta) -> int | None:
    """Read a checkpoint; return its version, None if it tells none. Collective over: the world.

    `meta.path` may be a folder of checkpoints: then the latest complete one is read. Everything is
    verified before the first weight changes.
    """
    load = {"dcp": load_dcp, "hf": load_hf, "adapter": load_adapter}[meta.weight_format]
    version = load(parts, meta)
    if parts.optimizer is not None and not meta.with_optim:
        parts.optimizer.forget_rounding()  # it belongs to the weights that were replaced
    return version
