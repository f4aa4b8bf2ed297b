"""Weight updates at the end of a trial: planned, recorded, and done once for each channel."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from fsdpbench.bench.folders import TrialFolder
from fsdpbench.bench.processes import list_descendants
from fsdpbench.bench.records import TrialSpec, WorkloadSpec
from fsdpbench.bench.sync_rounds import build_record, build_round, plan_meta, plan_prompt
from fsdpbench.engine.weight_sync.timings import UpdateTimings
from tests.distributed.pool import run_on_ranks

RUN = "tests.distributed.payloads.trial:run"
CONFIG = {
    "path": "tiny-llama",
    "init_from_scratch": True,
    "dtype": "float32",
    "optimizer": {"lr": 2e-3},
}


def make_spec(mode="xccl", world_size=1, config=None, **workload):
    chosen = {"sync_rounds": 2, "tokens_per_step": 64, **workload}
    return TrialSpec(
        id="t",
        config={**CONFIG, "weight_update_mode": mode, **(config or {})},
        world_size=world_size,
        workload=WorkloadSpec(**chosen),
        timeout_seconds=240.0,
        hang_seconds=75.0,
    )


def test_updates_give_up_before_the_watchdog_does(tmp_path):
    folder = TrialFolder(tmp_path)
    meta = plan_meta(make_spec("disk", sync_bucket_mb=8, sync_verify=False), folder)
    assert (meta.type, meta.path, meta.keep_versions) == ("disk", str(tmp_path / "weights"), 1)
    assert (meta.weight_chunked_mem_mb, meta.wire_dtype, meta.verify) == (8, "float32", False)
    assert meta.timeout_seconds == 60.0
    assert plan_meta(make_spec(), folder).path is None


def test_the_prompt_is_within_any_vocabulary():
    for size in (7, 512, 151936):
        tokens = plan_prompt(size)
        assert len(tokens) == 64
        assert all(0 <= token < size for token in tokens)
    assert len(set(plan_prompt(512))) == 64


def test_the_wire_is_compared_with_its_limit():
    timings = [
        UpdateTimings("xccl", 800, 2, pause_seconds=s + 0.1, transfer_seconds=s)
        for s in (9.0, 5.0, 1.0, 3.0, 2.0)
    ]
    record = build_record(
        plan_meta(make_spec(), TrialFolder(Path("t"))),
        timings,
        {"broadcast": 500.0},
        receiver_devices=["cpu", "cpu"],
        bytes=800,
        verified=True,
    )
    assert [entry.kind for entry in record.rounds[:3]] == ["cold", "warmup", "steady"]
    assert (record.receivers, record.num_buckets, record.transfer_seconds) == (2, 2, 2.0)
    assert record.bandwidth_bytes_per_second == 400.0
    assert record.share_of_broadcast_limit == pytest.approx(0.8)
    assert record.share_of_disk_limit is None


def test_the_disk_moves_bytes_into_files_and_out():
    timings = UpdateTimings("disk", pause_seconds=2.5, write_seconds=3.0, apply_seconds=2.0)
    assert build_round(0, timings).transfer_seconds == 5.0
    record = build_record(
        plan_meta(make_spec("disk"), TrialFolder(Path("t"))),
        [timings] * 3,
        {"write": 10.0, "read": 20.0},
        receiver_devices=["cpu"],
        bytes=20,
        verified=True,
    )
    assert record.share_of_disk_limit == pytest.approx(3.0 / 5.0)
    assert record.bandwidth_bytes_per_second == 4.0
    assert record.share_of_broadcast_limit is None


def list_receivers():
    found = []
    for pid in list_descendants(os.getpid()):
        with suppress(FileNotFoundError, ProcessLookupError):
            found.append(Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8"))
    return [line for line in found if "local_worker" in line]


def run_sync_trial(tmp_path, spec):
    folder = TrialFolder(tmp_path / "trial")
    folder.create(spec)
    assert all(run_on_ranks(RUN, spec.world_size, timeout_seconds=60, path=str(folder.path)))
    outcome = folder.load_outcome()
    assert outcome.status == "ok"
    assert not list_receivers(), "they are gone"
    return outcome


def test_two_ranks_send_to_a_receiver_over_the_wire(tmp_path):
    spec = make_spec(
        world_size=2, config={"backend": "fsdp:d2"}, steps=1, warmup_steps=0, sync_bucket_mb=1
    )
    outcome = run_sync_trial(tmp_path, spec)
    sync = outcome.sync
    assert len(outcome.step_seconds) == 1, "it trains first"
    assert (sync.mode, sync.receivers, sync.receiver_devices) == ("xccl", 1, ["cpu"])
    assert sync.verified
    assert 0 <= sync.logprob_error < 1e-3
    assert [entry.kind for entry in sync.rounds] == ["cold", "warmup", "steady", "steady"]
    assert sync.bytes > 1 << 20
    assert sync.num_buckets > 1
    assert sync.transfer_seconds > 0
    assert 0 < sync.gather_seconds < sync.pause_seconds
    assert sync.verify_seconds > 0
    assert sync.broadcast_limit_bytes_per_second > 0
    assert sync.share_of_broadcast_limit > 0
    assert sync.handle_growth == 0
    assert {beat.phase for beat in TrialFolder(tmp_path / "trial").read_heartbeats()} == {"done"}


def test_one_rank_sends_through_the_disk_without_a_step(tmp_path):
    outcome = run_sync_trial(tmp_path, make_spec("disk", steps=0, warmup_steps=0))
    sync = outcome.sync
    assert outcome.step_seconds == outcome.losses == []
    assert (sync.mode, sync.verified) == ("disk", True)
    assert sync.logprob_error < 1e-3
    assert sync.transfer_seconds == pytest.approx(sync.write_seconds + sync.apply_seconds, rel=0.5)
    assert sync.share_of_disk_limit > 0
    assert sync.broadcast_limit_bytes_per_second is None
    assert sync.bytes > 1 << 20
