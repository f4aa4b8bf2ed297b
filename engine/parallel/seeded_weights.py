"""Random weights that are the same for every mesh, and that no rank ever makes as a whole.

A matrix is drawn in blocks of whole rows, each from its own generator, seeded by the run's seed,
the tensor's name and the block's number. A rank draws the blocks that its region touches. Values
depend on the type of device that draws them, not on the number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from fsdpbench.engine.parallel.regions import Region, shape_of

BLOCK_ELEMENTS = 1 << 22  # of one draw: 16 MiB of fp32


class SeededWeights:
    """A source of random values: matrices normal, vectors as their constructors made them."""

    def __init__(
        self,
        seed: int,
        standard_deviation: float,
        device: torch.device,
        initial_values: Mapping[str, torch.Tensor],
        block_elements: int = BLOCK_ELEMENTS,
    ) -> None:
        self.seed, self.standard_deviation, self.device = seed, standard_deviation, device
        self.initial_values = initial_values  # norm weights, on the CPU
        self.block_elements = block_elements  # part of what is drawn: another size, other values

    def check_names(self, shapes: Mapping[str, torch.Size]) -> None:
        """Every name is fine."""

    def read(self, name: str, shape: torch.Size, region: Region) -> torch.Tensor:
        """Draw the region of a tensor, in fp32."""
        if name in self.initial_values:
            return self.initial_values[name][region]
        if len(shape) < 2:  # biases
            return torch.zeros(shape_of(region))
        rows, other_dims = region[0], region[1:]
        block_rows = max(1, self.block_elements // shape[1:].numel())
        values = torch.empty(shape_of(region), device=self.device)
        for block in range(rows.start // block_rows, -(-rows.stop // block_rows)):
            first, end = block * block_rows, min((block + 1) * block_rows, shape[0])
            drawn = self._draw(name, block, (end - first, *shape[1:]))
            start, stop = max(first, rows.start), min(end, rows.stop)
            kept = drawn[(slice(start - first, stop - first), *other_dims)]
            values[start - rows.start : stop - rows.start] = kept
        return values

    def _draw(self, name: str, block: int, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed_of(self.seed, name, block))
        return torch.empty(shape, device=self.device).normal_(
            0.0, self.standard_deviation, generator=generator
        )


def seed_of(seed: int, name: str, block: int) -> int:
    """Derive the seed of one block: 63 bits that no two (seed, name, block) share in practice."""
    digest = hashlib.blake2b(f"{seed}:{name}:{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
