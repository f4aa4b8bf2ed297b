"""Random weights do not depend on who draws which part."""

from __future__ import annotations

import pytest
import torch

from fsdpbench.engine.parallel.regions import plan_region
from fsdpbench.engine.parallel.seeded_weights import SeededWeights, seed_of

CPU = torch.device("cpu")


def make(seed=1, values=None, block_elements=1 << 22):
    return SeededWeights(seed, 0.02, CPU, values or {}, block_elements)


def read(source, name, shape, cuts=()):
    shape = torch.Size(shape)
    return source.read(name, shape, plan_region(shape, cuts))


@pytest.mark.parametrize("block_elements", [1, 40, 1 << 22])
def test_parts_are_parts_of_the_whole(block_elements):
    whole = read(make(block_elements=block_elements), "w", (13, 8))
    for rank in range(4):
        for tp_rank in range(2):
            for dim in (0, 1):
                cuts = [(dim, 2, tp_rank), (0, 4, rank)]
                part = read(make(block_elements=block_elements), "w", (13, 8), cuts)
                assert torch.equal(part, whole[plan_region((13, 8), cuts)])


def test_names_and_seeds_give_different_values():
    values = [read(make(seed), name, (64, 64)) for seed in (1, 2) for name in ("a", "b")]
    for index, value in enumerate(values):
        assert all(not torch.equal(value, other) for other in values[index + 1 :])
        assert abs(float(value.std()) - 0.02) < 1e-3
        assert abs(float(value.mean())) < 1e-3


def test_blocks_differ():
    value = read(make(block_elements=8), "w", (2, 8))
    assert not torch.equal(value[0], value[1])


def test_vectors_keep_their_constructors_values_and_biases_are_zero():
    source = make(values={"norm": torch.tensor([1.0, 2.0, 3.0])})
    assert read(source, "norm", (3,), [(0, 2, 1)]).tolist() == [3.0]
    assert read(source, "bias", (3,)).tolist() == [0.0, 0.0, 0.0]


def test_seeds_are_63_bits_and_stable():
    assert seed_of(1, "model.embed_tokens.weight", 0) == 2081231582604592422
    assert 0 <= seed_of(5, "x", 3) < 1 << 63
