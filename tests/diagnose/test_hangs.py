import os
import time

import pytest

from fsdpbench.bench.folders import TrialFolder
from fsdpbench.diagnose.hangs import judge_hang

STACK = 'Current thread 0x00007f02 (most recent call first):\n  File "/a/b.py", line 7 in {name}\n'


def make_trial(path, beats, stacks=None):
    """beats: rank -> (phase, step, seconds ago)."""
    folder = TrialFolder(path)
    folder.heartbeats.mkdir(parents=True)
    for rank, (phase, step, ago) in beats.items():
        folder.beat(rank, phase, step)
        when = time.time() - ago
        os.utime(folder.heartbeats / f"rank{rank}", (when, when))
    for rank, name in (stacks or {}).items():
        log = folder.logs / "run" / "attempt_0" / str(rank) / "stderr.log"
        log.parent.mkdir(parents=True)
        log.write_text(STACK.format(name=name))
    return folder


@pytest.mark.parametrize(
    ("beats", "stacks", "rank"),
    [
        ({0: ("step", 5, 60), 1: ("step", 3, 60)}, None, 1),
        ({0: ("step", 3, 60), 1: ("before_step", 3, 60)}, {0: "all_reduce", 1: "hang"}, 1),
        ({0: ("before_step", 3, 60.1), 1: ("step", 3, 60)}, None, 0),
        ({0: ("step", 3, 60), 1: ("step", 3, 90)}, None, 1),
        ({0: ("step", 3, 60), 1: ("step", 3, 60)}, {0: "wait", 1: "read"}, 1),
        ({0: ("step", 3, 60), 1: ("load", None, 60), 2: ("step", 3, 60)}, None, 1),
        ({0: ("step", 3, 60)}, None, 0),
    ],
)
def test_names_the_rank_that_stopped(tmp_path, beats, stacks, rank):
    verdict = judge_hang(make_trial(tmp_path, beats, stacks), silent=True)
    assert (verdict.rule, verdict.root_rank) == ("rank-hung", rank)
    assert verdict.phase == beats[rank][0]
    assert verdict.evidence
    if stacks:
        assert stacks[rank] in verdict.cause


def test_ranks_that_all_wait_are_a_mismatch(tmp_path):
    beats = {0: ("step", 3, 60), 1: ("step", 3, 60)}
    folder = make_trial(tmp_path, beats, {0: "all_reduce", 1: "broadcast"})
    verdict = judge_hang(folder, silent=True)
    assert (verdict.failure_class, verdict.root_rank) == ("nccl", None)
    assert "all_reduce" in verdict.cause
    assert "broadcast" in verdict.cause


def test_a_trial_without_any_beat(tmp_path):
    verdict = judge_hang(make_trial(tmp_path, {}), silent=True)
    assert verdict.failure_class == "unknown"
    assert "--hang-timeout" in verdict.remedies[0]


def test_a_trial_that_ran_out_of_time(tmp_path):
    verdict = judge_hang(make_trial(tmp_path, {0: ("step", 17, 1)}), silent=False)
    assert verdict.failure_class == "performance"
    assert "step 17" in verdict.cause
