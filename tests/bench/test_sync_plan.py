import pytest

from fsdpbench.bench.records import WorkloadSpec
from fsdpbench.bench.space import SweepSpace
from fsdpbench.bench.sweep import plan_sweep
from fsdpbench.bench.sync_plan import DEFAULT_SYNC_ROUNDS, check_sync, drop_unused, place_receivers
from fsdpbench.engine.config.train import TrainEngineConfig


@pytest.mark.parametrize(
    ("device", "world_size", "num_receivers", "num_gpus", "devices"),
    [
        ("cpu", 2, 2, 0, ["cpu", "cpu"]),
        ("cuda", 1, 1, 2, ["cuda:1"]),
        ("cuda", 2, 2, 8, ["cuda:2", "cuda:3"]),
        ("cuda", 1, 3, 3, ["cuda:1", "cuda:2", "cuda:1"]),
        ("cuda", 1, 2, 1, ["cuda:0", "cuda:0"]),
        ("cuda", 2, 1, 2, ["cuda:0"]),
    ],
)
def test_receivers_stand_behind_the_trainer(device, world_size, num_receivers, num_gpus, devices):
    assert place_receivers(device, world_size, num_receivers, num_gpus) == devices


@pytest.mark.parametrize(
    ("mode", "device", "world_size", "num_gpus", "rounds", "refused"),
    [
        ("xccl", "cuda", 1, 1, 3, True),
        ("xccl", "cuda", 2, 2, 3, True),
        ("xccl", "cuda", 1, 2, 3, False),
        ("xccl", "cuda", 1, 1, 0, False),
        ("disk", "cuda", 1, 1, 3, False),
        ("xccl", "cpu", 2, 0, 3, False),
    ],
)
def test_nccl_needs_a_device_a_rank(mode, device, world_size, num_gpus, rounds, refused):
    found = check_sync(
        WorkloadSpec(sync_rounds=rounds),
        TrainEngineConfig(weight_update_mode=mode),
        device=device,
        world_size=world_size,
        num_gpus=num_gpus,
    )
    assert [violation.where for violation in found] == ["weight_update_mode"] * refused
    if refused:
        assert "NCCL refuses two ranks on one device" in str(found[0])
        assert ("train on 1 of them" in str(found[0])) == (num_gpus == 2)


def plan(axes, num_gpus=0, **fields):
    return plan_sweep(SweepSpace(axes=axes, **fields), num_gpus).points


def test_varying_the_channel_asks_for_updates():
    points = plan({"weight_update_mode": ["xccl", "disk"], "sync_bucket_mb": [64, 256]})
    assert len(points) == 4
    assert {point.spec.workload.sync_rounds for point in points} == {DEFAULT_SYNC_ROUNDS}
    assert {point.spec.config["weight_update_mode"] for point in points} == {"xccl", "disk"}
    (given,) = plan({"weight_update_mode": ["disk"]}, workload={"sync_rounds": 2})
    assert given.spec.workload.sync_rounds == 2
    (training,) = plan({"seed": [1]})
    assert training.spec.workload.sync_rounds == 0


def test_one_gpu_has_the_disk_alone():
    wire, disk = plan({"weight_update_mode": ["xccl", "disk"]}, num_gpus=1)
    assert wire.spec is None
    assert "use weight_update_mode disk" in str(wire.violations[0])
    assert disk.spec is not None


def test_fields_of_updates_that_do_not_happen_are_no_part_of_the_work():
    assert "sync_receivers" not in drop_unused(WorkloadSpec(sync_receivers=3))
    assert drop_unused(WorkloadSpec(sync_receivers=3, sync_rounds=1))["sync_receivers"] == 3
    one, other = (
        plan({"seed": [1]}, workload={"sync_receivers": n, "sync_rounds": 0})[0] for n in (1, 2)
    )
    assert one.id == other.id


@pytest.mark.parametrize(
    ("workload", "where"),
    [
        ({"steps": 0}, "workload.sync_rounds"),
        ({"steps": 0, "sync_rounds": 1}, None),
        ({"sync_rounds": -1}, "workload.sync_rounds"),
        ({"sync_rounds": 1, "sync_receivers": 0}, "workload.sync_receivers"),
        ({"sync_rounds": 1, "sync_bucket_mb": 0}, "workload.sync_bucket_mb"),
    ],
)
def test_a_trial_trains_or_sends(workload, where):
    (point,) = plan({"seed": [1]}, workload=workload)
    assert [violation.where for violation in point.violations] == ([where] if where else [])
