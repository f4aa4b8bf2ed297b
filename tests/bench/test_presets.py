import pytest

from fsdpbench.bench.axes import iterate_grid, resolve_axes
from fsdpbench.bench.presets import MODELS_WITH_WEIGHTS, PRESETS, has_weights
from fsdpbench.bench.space import SweepSpace
from fsdpbench.bench.sweep import plan_sweep
from fsdpbench.engine.models.demo import DEMO_MODELS


@pytest.mark.parametrize("name", ["quick", "memory"])
@pytest.mark.parametrize(("num_gpus", "world_size"), [(0, 1), (0, 2), (0, 4), (1, 1), (8, 8)])
def test_every_preset_has_only_points_that_run(name, num_gpus, world_size):
    made = plan_sweep(SweepSpace(preset=name, world_size=world_size), num_gpus)
    assert made.points
    assert made.num_valid == len(made.points)
    assert made.num_duplicates == 0


def test_the_mesh_preset_has_every_factorisation():
    made = plan_sweep(SweepSpace(preset="mesh", world_size=4), 0)
    meshes = [point.axes["parallel"] for point in made.points]
    assert meshes == [
        "fsdp:d4c1t1", "fsdp:d2c2t1", "fsdp:d2c1t2", "fsdp:d1c4t1", "fsdp:d1c2t2", "fsdp:d1c1t4"
    ]  # fmt: skip
    assert made.points[-1].violations, "4 tensor ranks do not fit 2 key-value heads"


def test_the_memory_preset_varies_all_that_saves_memory():
    axes = resolve_axes(PRESETS["memory"].plan_axes("cuda", 2), 2)
    assert len(list(iterate_grid(axes))) == 3 * 2 * 2 * 2


def test_the_models_with_weights_are_those_of_the_demo():
    assert set(MODELS_WITH_WEIGHTS) == set(DEMO_MODELS)
    assert has_weights("/some/folder")
    assert not has_weights("tiny-qwen3")
