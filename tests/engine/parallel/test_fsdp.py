"""What is wrapped and with which policies; gradients on meshes are in test_parallelize."""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdpbench.engine.parallel.fsdp import build_offload_policy, find_modules_to_wrap
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
    for found in run_on_ranks(f"{POLICIES}:list_units", 2, classes=classes):
        assert found["units"] == units
        assert found["dtypes"] == {
            "master": "torch.float32",
            "compute": "torch.bfloat16",
            "gradient": "torch.float32",
        }
