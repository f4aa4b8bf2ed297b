"""Autograd collectives on 64-bit tensors that every rank can compute whole by itself."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fsdpbench.engine.parallel import sequence
from fsdpbench.engine.parallel.ulysses import gather_heads, gather_row, scatter_heads, slice_row


def draw(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def gather_and_differentiate(
    rank: int, world_size: int, function: str, dim: int
) -> tuple[float, float]:
    """Weights differ by rank for the summing variant, and are the same for the replicated one."""
    shape = (4, 6)
    parts = [draw(member, *shape) for member in range(world_size)]
    whole = torch.cat(parts, dim=dim)
    summed = function == "gather_sequence"
    weights = [draw(100 + (member if summed else 0), *whole.shape) for member in range(world_size)]
    own = parts[rank].clone().requires_grad_()
    gathered = getattr(sequence, function)(own, dist.group.WORLD, dim)
    (gathered * weights[rank]).sum().backward()
    gradient = sum(weights) if summed else weights[rank]
    wanted = gradient.chunk(world_size, dim=dim)[rank]
    return float((gathered - whole).abs().max()), float((own.grad - wanted).abs().max())


def scatter_and_differentiate(rank: int, world_size: int, dim: int) -> tuple[float, float]:
    """Every rank holds a summand of the whole and weights its own slice of the sum."""
    parts = [draw(member, 3, 6) for member in range(world_size)]
    weights = [draw(50 + member, *part.shape) for member, part in enumerate(parts)]
    weights = [weight.chunk(world_size, dim=dim)[n] for n, weight in enumerate(weights)]
    own = parts[rank].clone().requires_grad_()
    scattered = sequence.scatter_sequence_sum(own, dist.group.WORLD, dim)
    (scattered * weights[rank]).sum().backward()
    wanted = sum(parts).chunk(world_size, dim=dim)[rank]
    gradient = torch.cat(weights, dim=dim)
    return float((scattered - wanted).abs().max()), float((own.grad - gradient).abs().max())


def exchange(rank: int, world_size: int) -> tuple[float, float]:
    parts = [draw(member, world_size, 2, 3) for member in range(world_size)]
    weights = [draw(50 + member, world_size, 2, 3) for member in range(world_size)]
    own = parts[rank].clone().requires_grad_()
    received = sequence.exchange_all_to_all(own, dist.group.WORLD)
    (received * weights[rank]).sum().backward()
    wanted = torch.stack([part[rank] for part in parts])
    gradient = torch.stack([weight[rank] for weight in weights])
    return float((received - wanted).abs().max()), float((own.grad - gradient).abs().max())


def scatter_and_gather_heads(
    rank: int, world_size: int, query_heads: int, key_heads: int
) -> dict[str, float]:
    """The whole row is [T, H, D]; query head h uses key head h // (query_heads / key_heads)."""
    tokens, dim = 8, 3
    query, key = draw(1, tokens, query_heads, dim), draw(2, tokens, key_heads, dim)
    weight = draw(3, tokens, query_heads, dim)
    own_key = key.chunk(world_size)[rank].clone().requires_grad_()
    own_query = query.chunk(world_size)[rank]
    q, k, v = scatter_heads(own_query, own_key, own_key.detach(), dist.group.WORLD)
    heads = query_heads // world_size
    mine = slice(rank * heads, (rank + 1) * heads)
    needed = [h // (query_heads // key_heads) for h in range(query_heads)][mine]
    expanded = k.repeat_interleave(heads // k.shape[1], dim=1)
    (expanded * weight[:, mine]).sum().backward()
    wanted = torch.zeros_like(key)
    for head in range(query_heads):
        wanted[:, head // (query_heads // key_heads)] += weight[:, head]
    return {
        "query_error": float((q - query[:, mine]).abs().max()),
        "key_error": float((expanded - key[:, needed]).abs().max() + (k - v).abs().max()),
        "round_trip_error": float((gather_heads(q, dist.group.WORLD) - own_query).abs().max()),
        "key_gradient_error": float((own_key.grad - wanted.chunk(world_size)[rank]).abs().max()),
    }


def slice_and_gather_row(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    sliced = slice_row(torch.arange(6), dist.group.WORLD)
    return sliced.tolist(), gather_row(sliced, dist.group.WORLD).tolist()
