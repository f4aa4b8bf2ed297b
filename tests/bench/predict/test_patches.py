import sys

import torch
import torch.distributed._functional_collectives as functional_collectives
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from fsdpbench.bench.predict.patches import PATCHES, apply_patches
from fsdpbench.bench.predict.tracker import MemoryTracker


def read_targets():
    """Return what every patch replaces; fails where this torch has no such name."""
    return [
        torch.UntypedStorage.resize_,
        ShardingPropagator._propagate_tensor_meta_non_cached,
        functional_collectives._are_we_tracing,
        torch.Generator,
        torch.Tensor.pin_memory,
        torch.frombuffer,
    ]


def test_patches_replace_and_restore_everything():
    before = read_targets()
    assert len(before) == len(PATCHES)
    with apply_patches(MemoryTracker("cpu", None)):
        for original, replaced in zip(before, read_targets(), strict=True):
            assert original is not replaced
    assert all(a == b for a, b in zip(before, read_targets(), strict=True))


def test_every_module_that_asks_whether_it_is_traced_hears_no():
    with apply_patches(MemoryTracker("cpu", None)):
        askers = [m for m in list(sys.modules.values()) if "_are_we_tracing" in vars(m)]
        assert askers
        assert not any(vars(module)["_are_we_tracing"]() for module in askers)


def test_each_patch_says_why():
    assert all(patch.reason and patch.target for patch in PATCHES)
