"""Saves that go on while training does: copied to host memory at once, written by a thread.

Schedule of a save: wait for the one before; copy the state to host memory (training stands still
for this copy only); a thread writes it, over a process group of its own, since training uses the
others meanwhile. At most one save is in flight, so host memory holds one copy at most.

An error of the thread is raised by the next `save` or `wait`, on every rank, with its cause.
The interpreter waits for the thread at its exit.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from fsdpbench.engine.checkpoint.dcp import build_manifest, collect_state, write_checkpoint
from fsdpbench.engine.checkpoint.formats import save_checkpoint
from fsdpbench.engine.checkpoint.state import stage_on_host
from fsdpbench.engine.parallel.agreement import Agreement
from fsdpbench.engine.parallel.mesh import is_live
from fsdpbench.errors import CheckpointError, FsdpbenchError
from fsdpbench.log import get_logger

if TYPE_CHECKING:
    from fsdpbench.engine.checkpoint.manifest import Manifest
    from fsdpbench.engine.config.checkpoint import SaveLoadMeta
    from fsdpbench.engine.setup import EngineParts

logger = get_logger(__name__)


class AsyncSaves:
    """The saves of one engine, one after the other; each method is collective over the world."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None  # for the thread alone
        self._running: Future[None] | None = None
        self._path = ""

    @property
    def in_flight(self) -> bool:
        """Whether files are being written now. Local."""
        return self._running is not None and not self._running.done()

    def save(self, parts: EngineParts, meta: SaveLoadMeta, version: int) -> None:
        """Save at once, or with `meta.asynchronous` return when the state is copied.

        Raises CheckpointError first if the save before this one failed.
        """
        with Agreement("save", parts.meshes.cpu_group):
            self.wait()
        if not meta.asynchronous:
            save_checkpoint(parts, meta, version)
            return
        if self._group is None:
            self._group = dist.new_group(backend="gloo", group_desc="background_saves")
        content = collect_state(parts, version, with_optim=meta.with_optim)
        with Agreement("save", parts.meshes.cpu_group):
            staged = stage_on_host(content)
        manifest = build_manifest(parts, meta, version)
        self._path = meta.path
        pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running = pool.submit(write_in_background, staged, meta.path, manifest, self._group)
        pool.shutdown(wait=False)  # the thread ends with this save

    def wait(self) -> None:
        """Return when nothing is being written; raise the error of a save that failed."""
        running, self._running = self._running, None
        if running is None:
            return
        error = running.exception()
        if error is None:
            return
        raise CheckpointError(
            f"the background save to {self._path} failed: {error}. "
            "The checkpoint that was there before is as it was."
        ) from error

    def close(self) -> None:
        """Wait for the last save and release its process group; safe to call twice."""
        try:
            self.wait()
        finally:
            group, self._group = self._group, None
            if group is not None and dist.is_initialized() and is_live(group):
                dist.destroy_process_group(group)


def write_in_background(
    staged: dict[str, object], path: str | Path, manifest: Manifest, group: dist.ProcessGroup
) -> None:
    """Write a copied state; an error is logged at once, since the next save may be far away."""
    try:
        write_checkpoint(staged, path, manifest, group)
    except (FsdpbenchError, OSError, RuntimeError, ValueError) as error:
        logger.error("the background save to %s failed: %s", path, error)  # noqa: TRY400
        raise
