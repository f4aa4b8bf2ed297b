import json
import threading
import time

import pytest

from fsdpbench.bench.recorders.sampler import SampleFile, sample_in_background


class Counter:
    source = "counter"
    unavailable = None

    def __init__(self):
        self.calls = 0

    def sample(self):
        self.calls += 1
        return {"calls": self.calls}


class Missing:
    source = "missing"
    unavailable = "not here"

    def sample(self):
        raise AssertionError("an unavailable recorder is not asked")


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_samples_until_the_body_ends(tmp_path):
    counter = Counter()
    before = time.time()
    with sample_in_background([counter], tmp_path / "s.jsonl", rank=3, interval=0.01):
        time.sleep(0.1)
    lines = read(tmp_path / "s.jsonl")
    assert [line["calls"] for line in lines] == list(range(1, counter.calls + 1))
    assert len(lines) >= 3
    assert {line["rank"] for line in lines} == {3}
    assert all(before - 0.001 <= line["t"] <= time.time() for line in lines)
    assert not [thread for thread in threading.enumerate() if thread.name == "sampler"]


def test_takes_a_last_sample_at_the_end(tmp_path):
    with sample_in_background([Counter()], tmp_path / "s.jsonl", rank=0, interval=60):
        time.sleep(0.05)
    assert len(read(tmp_path / "s.jsonl")) == 2


def test_says_once_what_is_unavailable(tmp_path):
    with sample_in_background([Missing(), Counter()], tmp_path / "s.jsonl", 0, interval=0.01):
        time.sleep(0.05)
    said = [line for line in read(tmp_path / "s.jsonl") if line["source"] == "missing"]
    assert [line["unavailable"] for line in said] == ["not here"]


def test_stops_when_the_body_fails(tmp_path):
    with (
        pytest.raises(ZeroDivisionError),
        sample_in_background([Counter()], tmp_path / "s.jsonl", 0, interval=0.01),
    ):
        1 / 0  # noqa: B018 the division is the failure
    assert not [thread for thread in threading.enumerate() if thread.name == "sampler"]


def test_writers_of_one_file_do_not_tear_lines(tmp_path):
    path = tmp_path / "s.jsonl"

    def write(rank):
        file = SampleFile(path, rank)
        for number in range(200):
            file.append("test", {"number": number, "filling": "x" * 200})
        file.close()

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = read(path)
    for rank in range(4):
        assert [line["number"] for line in lines if line["rank"] == rank] == list(range(200))
