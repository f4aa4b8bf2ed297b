"""A run folder in which any file is damaged in any way: the results that are whole survive."""

import json

import pytest

from fsdpbench.bench.folders import RunFolder
from fsdpbench.bench.invocation import SweepOptions, resolve_space
from fsdpbench.bench.records import Record, encode
from fsdpbench.bench.runner import run_sweep
from fsdpbench.bench.store import read_records
from fsdpbench.diagnose.explain import explain_sources
from fsdpbench.errors import ConfigError, FsdpbenchError
from fsdpbench.reports.cli import summarize_run, write_reports
from fsdpbench.reports.run import load_run
from tests.bench.fakes import make_harness, make_plan

DAMAGES = {
    "empty": b"",
    "cut": b'{"id": "a", "sta',
    "deep": b"[" * 100_000,
    "deep-objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "binary": b"\xff\xfe\x00\x80",
    "zeros": b"\0" * 100,
    "list": b"[1, 2]",
    "text": b'"x"',
    "null": b"null",
    "digits": b"9" * 5000,
    "surrogate": b'{"id": "\\ud800", "status": "ok"}',
    "types": b'{"id": 3, "status": [], "axes": [1], "step": {}, "t": [], "phase": [1], "rank": [1],'
    b' "traceback": 3, "unix_seconds": 1e300, "space": [], "argv": {"a": 1}, "created_at": [1]}',
}


def damage(folder, content, trial_id="a"):
    """Damage every file of a run but for two whole records, and those of the trial `a`."""
    whole = [
        encode(Record(id=trial_id, status="crashed", axes={"n": 1}, reason="it failed")),
        encode(Record(id="b", status="ok", axes={"n": 2}, tokens_per_second=5.0)),
    ]
    trial = folder.trial(trial_id)
    trial.logs.mkdir(parents=True)
    trial.heartbeats.mkdir()
    (trial.path / "errors").mkdir()
    line = content.replace(b"\n", b"")
    text = b"\n".join([whole[0].encode(), line, whole[1].encode(), line])
    folder.results_path.write_bytes(text)
    folder.sweep_path.write_bytes(content)
    names = ["trial.json", "steps.jsonl", "samples.jsonl", "outcome.json", "trace.json"]
    names += ["heartbeat/rank0", "heartbeat/rankx", "errors/rank0.json", "logs/launcher.log"]
    for name in names:
        (trial.path / name).write_bytes(content)


@pytest.mark.parametrize("content", DAMAGES.values(), ids=DAMAGES)
def test_reports_and_explanations_go_on(tmp_path, content):
    folder = RunFolder(tmp_path)
    damage(folder, content)
    run = load_run(tmp_path)
    assert [record.id for record in run.records] == ["a", "b"]
    assert run.problems or not content
    answer = summarize_run(run, write_reports(run))
    assert json.loads(json.dumps(answer))["counts"] == {"ok": 1, "crashed": 1}
    verdict, trials = explain_sources([str(tmp_path)], None)
    assert verdict.failure_class == "unknown"
    assert [trial.id for trial in trials] == ["a", "b"]
    assert explain_sources([str(folder.trial("a").path)], None)[0].failure_class == "unknown"
    assert folder.trial("a").load_outcome() is None
    with pytest.raises(FsdpbenchError, match=r"trial\.json: is no trial's specification"):
        folder.trial("a").load_spec()


@pytest.mark.parametrize("content", DAMAGES.values(), ids=DAMAGES)
def test_a_sweep_is_resumed(tmp_path, content):
    folder = RunFolder(tmp_path)
    plan = make_plan([{"invalid": "does not fit"}])
    damage(folder, content, trial_id=plan.points[0].id)
    with pytest.raises(ConfigError, match=r"sweep.json.*give the sweep's own options again"):
        resolve_space(SweepOptions(resume=True), folder)
    result = run_sweep(plan, folder, make_harness(), resume=True)
    assert [record.reason for record in result.records] == ["it failed"], "its record was whole"
    assert len(read_records(folder.results_path).records) == 2
    assert json.loads(folder.sweep_path.read_text())["points"]


def test_folders_in_place_of_files(tmp_path):
    folder = RunFolder(tmp_path)
    damage(folder, b"")
    trial = folder.trial("a").path
    for path in (folder.sweep_path, trial / "outcome.json", trial / "errors/rank0.json"):
        path.unlink()
        path.mkdir()
    (trial / "heartbeat" / "rank1").mkdir()
    run = load_run(tmp_path)
    assert any("cannot be read" in problem for problem in run.problems)
    write_reports(run)
    assert folder.trial("a").load_outcome() is None
    assert explain_sources([str(tmp_path)], None)[0].failure_class == "unknown"
