import io
import random

import pytest

from fsdpbench.diagnose import logs
from fsdpbench.diagnose.logs import LogScanner


def scan(data, literals=("Error",), **limits):
    seen = []
    scanner = LogScanner(literals, "", seen.append)
    summary = scanner.scan(io.BytesIO(data), "file.log")
    return seen, summary


def test_numbers_lines_and_keeps_context():
    data = b"one\ntwo\n[rank1]: three Error\nfour\nfive"
    seen, summary = scan(data)
    (candidate,) = seen
    assert (candidate.line.number, candidate.line.text, candidate.line.rank) == (
        3,
        "three Error",
        1,
    )
    assert candidate.before == ["one", "two"]
    assert candidate.after == ["four", "five"]
    assert (summary.num_lines, summary.num_bytes) == (5, len(data))


def test_context_leaves_other_ranks_out():
    data = b"[rank0]: a\n[rank1]: b\nplain\n[rank0]: Error\n[rank1]: c\n[rank0]: d\n"
    (candidate,) = scan(data)[0]
    assert candidate.before == ["a", "plain"]
    assert candidate.after == ["d"]


@pytest.mark.parametrize("block_bytes", [64, 200, 1000, 1 << 20])
def test_blocks_of_any_size_show_the_same_lines(monkeypatch, block_bytes):
    monkeypatch.setattr(logs, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(logs, "MARGIN_BYTES", 64)
    rng = random.Random(block_bytes)
    lines = [
        f"{rng.choice(['Error', 'fine'])} {'ab'[i % 2] * rng.randrange(40)}" for i in range(300)
    ]
    expected = [(n, text.rstrip()) for n, text in enumerate(lines, 1) if "Error" in text]
    seen, summary = scan("\n".join(lines).encode())
    assert [(c.line.number, c.line.text) for c in seen] == expected
    assert summary.num_lines == 300


def test_a_long_line_is_cut_into_pieces():
    seen, _ = scan(b"x" * 100_000 + b"Error one" + b"y" * 100_000 + b"Error two\nend\n")
    assert [c.line.number for c in seen] == [1, 1]
    assert "Error one" in seen[0].line.text
    assert "Error two" in seen[1].line.text
    assert all(len(c.line.text) < 20_000 for c in seen)


def test_repeats_are_shown_a_limited_number_of_times():
    data = b"".join(b"Error %d\n" % i for i in range(5000))
    assert len(scan(data)[0]) == logs.MAX_REPEATS


def test_progress_is_remembered():
    data = b"step 1 loss 2.0\nError\nstep 2 loss 1.9\nthe loss of time\n"
    assert scan(data)[1].last_progress_line == 3
    assert scan(b"nothing\n")[1].last_progress_line == 0


@pytest.mark.parametrize(
    "line",
    [
        "{'loss': 3.5, 'grad_norm': 1.4, 'epoch': 0.01}",
        "[titan] 2025-08-21 21:44:46,949 - root - INFO - step: 12  loss: 10.7  tps: 140",
        "iteration 100 | lm loss: 2.1",
        "epoch 1 step 20 loss=0.5",
    ],
)
def test_what_a_training_step_looks_like(line):
    assert scan(line.encode() + b"\n")[1].last_progress_line == 1


def test_stamp_comes_from_a_line_before():
    data = b"2026-11-30 10:00:00,000 start\nplain\nError\n"
    (candidate,) = scan(data)[0]
    assert candidate.line.stamp is None
    assert candidate.find_stamp() == (11 * 31 + 30) * 86400 + 36000


def test_binary_files_are_recognised():
    assert scan(bytes(range(32)) * 50)[1].looks_binary
    assert not scan(b"plain text\n" * 50)[1].looks_binary


@pytest.mark.slow
def test_a_hundred_megabytes_in_bounded_time_and_memory():
    import resource
    import time

    line = (
        b"[titan] 2026-08-21 21:44:46,949 - root - INFO - step: %d  loss: 10.7  memory: 72.3GiB\n"
    )
    block = b"".join(line % i for i in range(12_000))
    data = io.BytesIO(block * (100_000_000 // len(block)) + b"Error\n")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    seen = []
    LogScanner(("Error",), "", seen.append).scan(data, "big")
    assert time.process_time() - started < 15
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
    assert len(seen) == 1
