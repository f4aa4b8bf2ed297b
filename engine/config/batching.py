"""How a batch is cut into packed micro-batches; the cutting is in `engine.batching`."""

from __future__ import annotations

from typing import Literal

from fsdpbench.engine.config.strict import Count, StrictModel


class MicroBatchSpec(StrictModel):
    """Bounds on the micro-batches of one step."""

    n_mbs: Count = 1
    """Fewest micro-batches per step; more are made when max_tokens_per_mb demands it."""
    granularity: Count = 1
    """Adjacent sequences kept together; 2 keeps pairs."""
    max_tokens_per_mb: Count | None = None
    """Most tokens in a micro-batch; None sets no bound. A longer sequence is refused."""
    n_mbs_divisor: Count = 1
    """The number of micro-batches is rounded up to a multiple of this."""
    packing_algorithm: Literal["ffd", "kk"] = "ffd"
    """First-fit decreasing (fewest micro-batches) or Karmarkar-Karp (most even ones)."""
