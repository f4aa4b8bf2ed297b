import os
import signal

import pytest

from fsdpbench.bench.folders import RunFolder
from fsdpbench.bench.processes import list_descendants, list_marked
from fsdpbench.bench.trial import Command, Watch, count_oom_kills, run_trial
from tests.bench.fakes import fake_command, is_alive, make_spec


def run(tmp_path, axes, watch=None, **limits):
    spec = make_spec(axes, **limits)
    folder = RunFolder(tmp_path).trial(spec.id)
    folder.create(spec)
    return folder, run_trial(folder, spec, fake_command(spec, folder), watch or Watch())


def test_a_trial_that_ends_by_itself(tmp_path):
    beats = []
    folder, end = run(
        tmp_path, {"behave": "ok", "seconds": 0.8}, Watch(on_beat=lambda seen: beats.append(seen))
    )
    assert (end.ended_by, end.exit_code, end.strays, end.stuck) == ("itself", 0, 0, [])
    assert end.seconds >= 0.8
    assert folder.load_outcome().status == "ok"
    assert beats[-1][0].phase == "init"


def test_a_grandchild_in_its_own_session_does_not_outlive_the_trial(tmp_path):
    folder, end = run(tmp_path, {"behave": "orphan"})
    assert end.exit_code == 0
    assert end.strays == 1
    assert not is_alive(int((folder.path / "orphan").read_text()))


def test_hanging_ranks_are_shown_and_asked_for_their_stacks(tmp_path):
    seen = []
    watch = Watch(on_hang=lambda folder, pids: seen.append((folder, [is_alive(p) for p in pids])))
    folder, end = run(tmp_path, {"behave": "stacks"}, watch, hang_seconds=2.5)
    assert end.ended_by == "hang"
    assert seen == [(folder.path, [True])]
    assert (folder.path / "stacks").read_text() == "asked"


def test_an_error_of_ours_still_ends_the_trial(tmp_path):
    def fail(beats):
        raise RuntimeError("observer broke")

    with pytest.raises(RuntimeError, match="observer broke"):
        run(tmp_path, {"behave": "endless"}, Watch(on_beat=fail))
    assert list_marked(str(tmp_path)) == []


def test_a_trial_whose_supervisor_is_killed_is_still_ended(tmp_path):
    def shoot(beats):
        if (folder.path / "orphan").exists():
            marked = list_marked(str(tmp_path))  # the test process has other children, too
            supervisor, *_ = [pid for pid in list_descendants(os.getpid()) if pid in marked]
            os.kill(supervisor, signal.SIGKILL)

    folder = RunFolder(tmp_path).trial(make_spec({"behave": "orphan", "seconds": 600.0}).id)
    _, end = run(tmp_path, {"behave": "orphan", "seconds": 600.0}, Watch(on_beat=shoot))
    assert (end.ended_by, end.exit_code) == ("itself", None)
    assert end.strays == 2
    assert list_marked(str(tmp_path)) == []


def test_a_command_that_cannot_start(tmp_path):
    spec = make_spec()
    folder = RunFolder(tmp_path).trial(spec.id)
    folder.create(spec)
    end = run_trial(folder, spec, Command(["/no/such/program"], {}), Watch())
    assert end.exit_code == 127
    assert "cannot start" in folder.launcher_log.read_text()


def test_the_trial_sees_only_the_environment_given(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "secret")
    spec = make_spec()
    folder = RunFolder(tmp_path).trial(spec.id)
    folder.create(spec)
    run_trial(folder, spec, Command(["/usr/bin/env"], {"PATH": "/usr/bin"}), Watch())
    names = {line.partition("=")[0] for line in folder.launcher_log.read_text().splitlines()}
    assert names - {"LC_CTYPE"} == {"PATH", "FSDPBENCH_TRIAL"}


def test_the_kernels_count_is_a_number():
    assert count_oom_kills() >= 0
