"""What is wrapped and with which policies; gradients on meshes are in test_parallelize."""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdpbench.engine.parallel.fsdp import (
    apply_prefetch,
    build_offload_policy,
    check_units,
    find_modules_to_wrap,
    parents_of,
)
from fsdpbench.errors import ConfigError
from tests.distributed.pool import run_on_ranks

POLICIES = "tests.distributed.payloads.parallel_fsdp"


class Inner(nn.Module):
    pass


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()


def test_inner_modules_come_before_those_that_hold_them():
    model = nn.Sequential(Outer(), Outer())
    found = find_modules_to_wrap(model, ["Outer", "Inner"])
    assert [type(module).__name__ for module in found] == ["Inner", "Outer", "Inner", "Outer"]


def test_every_class_without_a_module_is_named():
    with pytest.raises(ConfigError, match="'Missing'") as caught:
        find_modules_to_wrap(Outer(), ["Missing", "Inner", "Absent"])
    assert [violation.found for violation in caught.value.violations] == ["'Missing'", "'Absent'"]
    assert "Inner, Outer" in str(caught.value)


def test_only_cuda_pins_offloaded_shards():
    assert not isinstance(build_offload_policy(False, "cuda"), CPUOffloadPolicy)
    for device_type, pinned in (("cuda", True), ("cpu", False), ("simgpu", False)):
        policy = build_offload_policy(True, device_type)
        assert isinstance(policy, CPUOffloadPolicy)
        assert policy.pin_memory == pinned


@pytest.mark.parametrize(
    ("classes", "units"),
    [(None, ["", "0", "1"]), (["Linear"], ["", "0.a", "0.b", "1.a", "1.b"])],
)
def test_units_follow_the_policy(classes, units):
    for found in run_on_ranks(f"{POLICIES}:list_units", 2, classes=classes, fields={}):
        assert found["units"] == units
        assert found["dtypes"] == {
            "master": "torch.float32",
            "compute": "torch.bfloat16",
            "gradient": "torch.float32",
        }


@pytest.mark.parametrize(
    ("fields", "gathered"),
    [
        ({}, [False, False]),
        ({"reshard_after_forward": False}, [True, True]),
        ({"forward_prefetch_layers": 1, "backward_prefetch_layers": 2}, [False, False]),
    ],
    ids=["default", "kept", "prefetch"],
)
def test_layers_rest_as_asked_after_forward_and_gradients_stay(fields, gathered):
    plain = run_on_ranks(f"{POLICIES}:list_units", 2, classes=None, fields={})
    for found, other in zip(
        run_on_ranks(f"{POLICIES}:list_units", 2, classes=None, fields=fields), plain, strict=True
    ):
        assert found["gathered after forward"] == gathered
        assert found["gradient sum"] == other["gradient sum"]


class Unit:
    """Records what it was told, in the place of an FSDP module."""

    def __init__(self, name):
        self.name, self.forward, self.backward = name, None, None

    def set_modules_to_forward_prefetch(self, units):
        self.forward = [unit.name for unit in units]

    def set_modules_to_backward_prefetch(self, units):
        self.backward = [unit.name for unit in units]


def test_prefetch_follows_the_order_of_the_passes():
    layers = [Unit(name) for name in "cba"]  # as find_modules_to_wrap lists them
    root = Unit("root")
    apply_prefetch([*layers, root], 2, 1)
    assert [unit.forward for unit in (root, *layers[::-1])] == [["a", "b"], ["b", "c"], ["c"], []]
    assert [unit.backward for unit in (root, *layers)] == [["c"], ["b"], ["a"], []]


def test_no_prefetch_leaves_torch_alone():
    units = [Unit("a"), Unit("root")]
    apply_prefetch(units, 0, 0)
    assert all(unit.forward is None and unit.backward is None for unit in units)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.outer, self.head = nn.Linear(2, 2), Outer(), nn.Linear(2, 2)
        self.outer.inner.register_parameter("weight", self.embedding.weight)


def test_a_tied_parameter_stays_in_one_unit():
    model = Tied()
    with pytest.raises(ConfigError, match=r"outer\.inner\.weight is tied to"):
        check_units(model, [model.outer], ())
    check_units(model, [], ())
    check_units(model, [model.head], ())


def test_what_the_root_reads_stays_in_the_root():
    model = Tied()
    with pytest.raises(ConfigError, match=r"the root itself reads head\.weight"):
        check_units(model, [model.head], [model.head.weight])


def test_parents_come_from_the_nearest():
    assert parents_of("a.b.c") == ["a.b", "a"]
    assert parents_of("a") == parents_of("") == []
