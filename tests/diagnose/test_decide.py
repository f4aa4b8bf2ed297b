import io

import pytest

from fsdpbench.diagnose.decide import decide, fill_cause
from fsdpbench.diagnose.matching import build_matcher

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
FULL = "OSError: [Errno 28] No space left on device"
CLOSED = "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:1."


def judge(*logs, first_rank=None):
    matcher = build_matcher()
    for number, text in enumerate(logs):
        name = f"log{number}"
        matcher.findings.logs[name] = matcher.scanner.scan(io.BytesIO(text.encode()), name)
    return decide(matcher.findings, first_rank)


def test_the_earlier_clock_wins_over_the_order_of_files():
    early, late = f"2026-11-30 10:00:00 {FULL}", f"2026-11-30 10:01:00 {OOM}"
    assert judge(late, early).failure_class == "storage"
    assert judge(early, late).failure_class == "storage"


def test_within_the_same_moment_the_more_specific_rule_wins():
    one = f"2026-11-30 10:00:01 {OOM}"
    other = "2026-11-30 10:00:00 subprocess died with <Signals.SIGKILL: 9>"
    assert judge(other, one).failure_class == "cuda_oom"


def test_a_cause_far_later_in_one_stream_is_a_consequence():
    assert judge(FULL + "\n" + "x\n" * 500 + OOM).failure_class == "storage"


def test_a_cause_beats_symptoms_on_other_ranks():
    verdict = judge(f"[rank0]: {CLOSED}\n[rank2]: {OOM}\n[rank1]: {CLOSED}")
    assert (verdict.failure_class, verdict.root_rank) == ("cuda_oom", 2)


def test_a_symptom_does_not_blame_the_rank_that_noticed():
    verdict = judge(f"[rank0]: {CLOSED}")
    assert (verdict.failure_class, verdict.root_rank) == ("nccl", None)


def test_a_rank_known_to_have_failed_first_is_believed():
    text = f"[rank0]: {OOM}\n[rank1]: {FULL}"
    assert judge(text, first_rank=1).failure_class == "storage"
    assert judge(text, first_rank=0).failure_class == "cuda_oom"


def test_an_unknown_exception_after_the_symptom_does_not_matter():
    text = f'[rank0]: {CLOSED}\n[rank0]:   File "a.py", line 1, in f\n[rank0]: KeyError: 3'
    assert judge(text).failure_class == "nccl"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("x.py:1: UserWarning: odd\nstep 1 loss 2.0", "healthy"),
        ("x.py:1: UserWarning: odd", "unknown"),
        ("destroy_process_group() was not called before program exit", "healthy"),
        ("Traceback (most recent call last):\n  File", "unknown"),
        ("ERROR odd\nstep 1 loss 2.0", "unknown"),
        ("step 1 loss 2.0", "healthy"),
    ],
)
def test_quiet_logs(text, answer):
    assert judge(text).failure_class == answer


def test_fills_the_first_sentence_that_is_known():
    assert fill_cause(["{a} and {b}", "{a} alone", "none"], {"a": 1}) == "1 alone"
    assert fill_cause(["{a:.1f}"], {"a": 1.25}) == "1.2"
    assert fill_cause(["has {a} here"], {}) == "has here"
