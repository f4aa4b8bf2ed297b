"""Where ranks stand, which groups they share, and that an engine leaves nothing behind."""

from __future__ import annotations

import math

import pytest

from fsdpbench.engine.config.parallel import FSDPParallelStrategy
from fsdpbench.engine.parallel.mesh import DeviceMeshes, ParallelHelper, check_world_size
from fsdpbench.errors import TopologyError
from tests.distributed.pool import run_on_ranks

MESHES = "tests.distributed.payloads.parallel_meshes"


def test_guide_name():
    assert ParallelHelper is DeviceMeshes


def test_a_product_that_is_not_the_world_names_every_number():
    strategy = FSDPParallelStrategy(
        data_parallel_size=3, context_parallel_size=2, tensor_parallel_size=5
    )
    with pytest.raises(TopologyError, match=r"3 x 2 x 5 = 30.*world size 8.*launch 30"):
        check_world_size(strategy, 8)


@pytest.mark.parametrize(
    ("dp", "cp", "tp"), [(1, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2), (1, 4, 1)]
)
def test_groups_hold_the_ranks_of_their_axes(dp, cp, tp):
    results = run_on_ranks(
        f"{MESHES}:describe", dp * cp * tp, timeout_seconds=240, dp=dp, cp=cp, tp=tp
    )
    for rank, found in enumerate(results):
        d, c, t = rank // (cp * tp), rank // tp % cp, rank % tp

        def at(d, c, t):
            return (d * cp + c) * tp + t

        assert found["place"] == (d, c, t)
        assert found["rank"] == rank
        assert found["world_size"] == dp * cp * tp
        assert found["head"] == (c == t == 0, at(d, 0, 0))
        expected = {
            "dp_group": [at(i, c, t) for i in range(dp)],
            "cp_group": [at(d, i, t) for i in range(cp)],
            "tp_group": [at(d, c, i) for i in range(tp)],
            "fsdp_group": [at(i, j, t) for i in range(dp) for j in range(cp)],
            "model_parallel_group": [at(d, i, j) for i in range(cp) for j in range(tp)],
            "cpu_group": list(range(dp * cp * tp)),
            "dp_cpu_group": [at(i, c, t) for i in range(dp)],
        }
        assert found["groups"] == expected
        assert found["mesh_shapes"] == ((dp, cp, tp), (dp * cp,), (tp,) if tp > 1 else None)


def test_destroy_releases_own_groups_alone_and_twice_is_harmless():
    for before, during, after, total in run_on_ranks(f"{MESHES}:build_and_destroy", 2):
        assert during > before
        assert after == before
        assert total == 3.0  # the default group still works


@pytest.mark.parametrize("degrees", [(2, 1, 1), (2, 1, 2)])
def test_parameters_do_not_keep_the_groups_of_a_destroyed_engine(degrees):
    world_size = math.prod(degrees)
    counts = run_on_ranks(f"{MESHES}:count_threads_of_builds", world_size, degrees=degrees)
    for before, after in counts:
        assert after == before


def test_equal_meshes_of_two_engines_are_told_apart():
    for equal, hashes_equal in run_on_ranks(f"{MESHES}:compare_two_builds", 2):
        assert not equal
        assert not hashes_equal
