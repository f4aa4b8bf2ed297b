"""Ulysses context parallelism over one packed row.

Outside attention a rank holds T / cp consecutive tokens with all heads; inside, all T tokens with
H / cp heads. One all-to-all leads in (query, key and value in one message) and one leads out. With
fewer key/value heads than ranks, each is replicated: every rank gets the one its queries use.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fsdpbench.engine.parallel.sequence import exchange_all_to_all, gather_sequence_replicated
from fsdpbench.errors import TopologyError, Violation

# Shape suffixes: T tokens of the whole row, S = T / cp tokens of this rank, N ranks, H heads here.


def slice_row(x_T: torch.Tensor, group: dist.ProcessGroup, dim: int = 0) -> torch.Tensor:
    """Return this rank's slice of a packed row. No communication: all ranks hold the whole row."""
    ranks = group.size()
    if x_T.shape[dim] % ranks:
        raise TopologyError(
            [
                Violation(
                    "packed row",
                    f"{x_T.shape[dim]} tokens",
                    f"must be a multiple of context_parallel_size={ranks}",
                    "pad the row to a multiple of context_parallel_size x tensor_parallel_size",
                )
            ]
        )
    return x_T.chunk(ranks, dim=dim)[group.rank()]


def gather_row(x_S: torch.Tensor, group: dist.ProcessGroup, dim: int = 0) -> torch.Tensor:
    """Return the whole row from the ranks' slices, for a loss that every rank computes alike.

    The gradient of a rank's slice is its part of that rank's own gradient, so the ranks' parameter
    gradients add up to the gradient of one loss. Collective over: cp.
    """
    return gather_sequence_replicated(x_S, group, dim)


def scatter_heads(
    query_SHD: torch.Tensor,
    key_SHD: torch.Tensor,
    value_SHD: torch.Tensor,
    group: dist.ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Trade tokens for heads: [S, H, D] of all heads to [T, H / cp, D]. Collective over: cp."""
    ranks = group.size()
    whole = (_replicate_heads(x, ranks) for x in (query_SHD, key_SHD, value_SHD))
    parts = [torch.unflatten(x, 1, (ranks, -1)) for x in whole]
    heads = [part.shape[2] for part in parts]
    packed_NSHD = torch.cat(parts, dim=2).transpose(0, 1)
    packed_THD = exchange_all_to_all(packed_NSHD, group).flatten(0, 1)
    query, key, value = torch.split(packed_THD, heads, dim=1)
    return query, key, value


def gather_heads(output_THD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Trade heads for tokens: [T, H / cp, D] to [S, H, D]. Collective over: cp."""
    parts_NSHD = torch.unflatten(output_THD, 0, (group.size(), -1))
    return exchange_all_to_all(parts_NSHD, group).transpose(0, 1).flatten(1, 2)


def _replicate_heads(x_SHD: torch.Tensor, ranks: int) -> torch.Tensor:
    """Repeat each head until there is one per rank; rank i then holds head i * H // ranks."""
    heads = x_SHD.shape[1]
    if heads >= ranks:
        return x_SHD
    return x_SHD.repeat_interleave(ranks // heads, dim=1)
