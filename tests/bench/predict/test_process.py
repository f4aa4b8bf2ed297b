import io
import json
import sys

import pytest

from fsdpbench.bench.predict.events import MemoryEvent
from fsdpbench.bench.predict.process import describe, main
from fsdpbench.bench.predict.trace import Category, PhaseMark, Trace, measure_phases

REQUEST = {
    "config": {"path": "tiny-llama", "init_from_scratch": True, "optimizer": {}},
    "workload": {"sequence_lengths": [64], "steps": 2, "warmup_steps": 0},
    "world_size": 1,
}


def ask(monkeypatch, capsys, *texts):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{text}\n" for text in texts)))
    exit_code = main()
    return exit_code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"config": {**REQUEST["config"], "optimizer": None}}, "runs training steps"),
        ({"config": {**REQUEST["config"], "backend": "fsdp:d3"}}, "must equal world_size = 1"),
        ({"rank": 1}, "must be one of 1 ranks"),
        ({"world_size": 0}, "greater than or equal to 1"),
        ({"gpu": "h200"}, "not permitted"),
    ],
    ids=["inference", "degrees", "rank", "world", "unknown"],
)
def test_what_cannot_be_simulated_is_refused(monkeypatch, capsys, change, expected):
    exit_code, answers = ask(monkeypatch, capsys, json.dumps({**REQUEST, **change}))
    assert exit_code == 1
    assert expected in answers[0]["error"]


def test_every_request_has_an_answer(monkeypatch, capsys):
    exit_code, answers = ask(monkeypatch, capsys, "no JSON", json.dumps({**REQUEST, "rank": 7}))
    assert exit_code == 1
    assert ["error" in answer for answer in answers] == [True, True]


def test_a_trace_is_described_with_what_the_allocator_makes_of_it():
    events = [MemoryEvent("alloc", 0, 100, 0)]
    categories = {0: Category.PARAMETERS}
    phases = measure_phases(events, categories, [PhaseMark(0, "load", 0)])
    trace = Trace(3, 8, "varlen_attn", events, categories, phases, ["a note"])
    described = json.loads(json.dumps(describe(trace, with_events=True)))
    assert described["peak_device_bytes"] == 512
    assert described["peak_reserved_bytes"] == 2 << 20
    assert described["peak_phase"]["split"] == {"parameters": 512}
    assert described["events"] == [["alloc", 0, 100, 0]]
    assert "events" not in describe(trace, with_events=False)
