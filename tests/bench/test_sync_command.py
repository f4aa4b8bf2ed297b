import json
from pathlib import Path

import pytest

from fsdpbench.bench.records import Record
from fsdpbench.bench.sweep import plan_sweep
from fsdpbench.bench.sync_command import SyncOptions, build_answer, build_space, check_plan
from fsdpbench.bench.sync_record import SyncRecord
from fsdpbench.errors import ConfigError


def plan(num_gpus=0, **options):
    return plan_sweep(build_space(SyncOptions(**options)), num_gpus)


def test_options_become_one_trial_without_steps():
    made = plan(model="tiny-llama", parallel="fsdp:d2t2", mode="disk", receivers=2, rounds=3)
    check_plan(made)
    (point,) = made.points
    assert point.spec.world_size == 4
    assert point.spec.config["weight_update_mode"] == "disk"
    workload = point.spec.workload
    assert (workload.num_steps, workload.sync_rounds, workload.sync_receivers) == (0, 3, 2)


def test_every_reason_against_the_trial_is_raised():
    with pytest.raises(ConfigError, match="NCCL refuses"):
        check_plan(plan(num_gpus=1, model="tiny-llama"))
    with pytest.raises(ConfigError, match="must divide"):
        check_plan(plan(model="tiny-llama", parallel="fsdp:t3"))
    with pytest.raises(ConfigError, match="--rounds"):
        plan(rounds=0)
    with pytest.raises(ConfigError, match="position 5"):
        plan(parallel="fsdp:x1")


def test_the_answer_names_what_scripts_read():
    sync = SyncRecord(
        mode="xccl",
        receivers=1,
        bytes=100,
        verified=True,
        pause_seconds=0.5,
        transfer_seconds=0.25,
        share_of_broadcast_limit=0.75,
    )
    answer = json.loads(json.dumps(build_answer(Path("r"), Record(id="a", status="ok", sync=sync))))
    expected = {
        "verified": True,
        "pause_seconds": 0.5,
        "transfer_seconds": 0.25,
        "bytes": 100,
        "share_of_broadcast_limit": 0.75,
        "status": "ok",
        "run": "r",
    }
    assert expected.items() <= answer.items()


@pytest.mark.parametrize("record", [None, Record(id="a", status="crashed", reason="gone")])
def test_a_trial_without_figures_is_not_verified(record):
    answer = build_answer(Path("r"), record)
    assert answer["verified"] is False
    assert answer["pause_seconds"] is None
    assert answer["reason"] == (record and "gone")
