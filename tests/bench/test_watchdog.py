import pytest

from fsdpbench.bench.watchdog import Watchdog


def judge_all(times_and_beats, timeout=100.0, hang=10.0):
    watchdog = Watchdog(0.0, timeout, hang)
    return [watchdog.judge(now, beats) for now, beats in times_and_beats]


@pytest.mark.parametrize(
    ("looks", "last"),
    [
        ([(10.0, ())], None),
        ([(10.1, ())], "hang"),
        ([(9.0, (1,)), (19.0, (1,))], None),
        ([(9.0, (1,)), (19.1, (1,))], "hang"),
        ([(9.0, (1,)), (19.1, (2,))], None),
        ([(9.0, (5,)), (18.0, (4,)), (27.0, (4,))], None),
        ([(t * 9.0, (t,)) for t in range(12)], None),
        ([(t * 9.0, (t,)) for t in range(13)], "timeout"),
        ([(101.0, ())], "hang"),
    ],
    ids=[
        "starting", "never beat", "beat once", "stopped", "still beating", "clock set back",
        "until the limit", "past the limit", "hang before timeout",
    ],
)  # fmt: skip
def test_judgements(looks, last):
    *before, end = judge_all(looks)
    assert set(before) <= {None}
    assert end == last
