import torch

from fsdpbench.bench.predict.patches import PATCHES
from fsdpbench.bench.predict.trace import Category, measure_phases
from fsdpbench.bench.predict.tracker import MemoryTracker


def track():
    return MemoryTracker("cpu", None)


def test_storages_count_once_from_first_to_last_reference():
    with track() as tracker:
        tensor = torch.empty(1000)
        view = tensor[10:].view(-1, 2)
        del tensor
        assert [event.kind for event in tracker.events] == ["alloc"]
        del view
    assert [(kind, size) for kind, _, size, _ in tracker.events] == [
        ("alloc", 4000),
        ("free", 4000),
    ]


def test_a_resized_storage_is_another_block():
    watch = next(patch for patch in PATCHES if patch.target == "torch.UntypedStorage.resize_")
    tracker = track()
    with watch.apply(tracker), tracker:
        tensor = torch.empty(1024, dtype=torch.uint8)
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(2048)
    kinds = [(event.kind, event.num_bytes) for event in tracker.events]
    assert kinds == [("alloc", 1024), ("free", 1024), ("alloc", 2048)]
    assert tracker.categories[tracker.events[-1].block_id] is Category.FSDP_BUFFERS


def test_what_a_forward_pass_leaves_is_an_activation():
    tracker = track()
    weight = torch.ones(64, 64, requires_grad=True)
    with tracker:
        tracker.enter_phase(1, "forward")
        hidden = torch.ones(64, 64) @ weight
        loss = (hidden.sin() * 2).sum()
        tracker.enter_phase(1, "backward")
        loss.backward()
        tracker.claim([weight.grad], Category.GRADIENTS)
    named = measure_phases(tracker.events, tracker.categories, tracker.marks)
    forward, backward = named[1], named[2]
    # the input of the product and that of the sine; the sine itself is gone at once
    assert forward.split[Category.ACTIVATIONS] >= 2 * 64 * 64 * 4
    assert backward.end_bytes >= 64 * 64 * 4
    assert Category.GRADIENTS in tracker.categories.values()


def test_paused_and_foreign_devices_do_not_count():
    with track() as tracker:
        with tracker.pause():
            unseen = torch.empty(1000)
        elsewhere = torch.empty(1000, device="meta")
        assert tracker.events == []
    del unseen, elsewhere


def test_workspaces_come_and_go_but_for_cublas():
    with MemoryTracker("cpu", "sm90") as tracker:
        left = torch.ones(4, 4)
        left @ left
        left @ left
    workspaces = [
        event
        for event in tracker.events
        if tracker.categories[event.block_id] is Category.WORKSPACES
    ]
    assert [(event.kind, event.num_bytes) for event in workspaces] == [("alloc", 32 << 20)]
