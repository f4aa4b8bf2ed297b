import signal
import subprocess
import sys

import pytest

from fsdpbench.bench import faults
from fsdpbench.bench.faults import Fault, FaultContext, parse_fault, strike_fault
from fsdpbench.errors import ConfigError


def refuse(num_bytes):
    raise MemoryError(num_bytes)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("hang@3", Fault("hang", 3, 0)),
        ("kill@0:rank=1", Fault("kill", 0, 1)),
        ("crash@12:rank=10", Fault("crash", 12, 10)),
        ("oom@3", Fault("oom", 3, 0)),
    ],
)
def test_parses(text, fault):
    assert parse_fault(text) == fault


@pytest.mark.parametrize(
    ("text", "words", "count"),
    [
        ("hnag@3", "did you mean 'hang'", 1),
        ("hang", "needs a step", 1),
        ("hang@-1", "needs a step", 1),
        ("hang@x", "needs a step", 1),
        ("hang@3:node=1", "only one is rank=RANK", 1),
        ("hang@3:rank=", "only one is rank=RANK", 1),
        ("nonsense@:bad", "must name one of hang, kill, crash, oom", 3),
        ("", "must name one of", 2),
    ],
)
def test_refuses_with_all_mistakes(text, words, count):
    with pytest.raises(ConfigError, match=words) as caught:
        parse_fault(text)
    assert len(caught.value.violations) == count


def test_strikes_only_its_rank_and_step():
    fault = parse_fault("crash@2:rank=1")
    for rank, step in [(0, 2), (1, 1), (1, 3)]:
        strike_fault(fault, FaultContext(rank, step, refuse))
    strike_fault(None, FaultContext(1, 2, refuse))
    with pytest.raises(RuntimeError, match="injected crash on rank 1 before step 2"):
        strike_fault(fault, FaultContext(1, 2, refuse))


def test_oom_raises_what_the_allocator_raises():
    with pytest.raises(MemoryError):
        strike_fault(parse_fault("oom@0"), FaultContext(0, 0, refuse))


def test_oom_of_a_real_cpu_allocation():
    torch = pytest.importorskip("torch")
    context = FaultContext(0, 0, lambda n: torch.empty(n, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        strike_fault(parse_fault("oom@0"), context)


def run_fault(text, timeout):
    code = (
        "from fsdpbench.bench.faults import *\n"
        f"strike_fault(parse_fault({text!r}), FaultContext(0, 0, id))\n"
    )
    return subprocess.run([sys.executable, "-c", code], timeout=timeout, check=False).returncode


def test_kill_dies_by_sigkill():
    assert run_fault("kill@0", timeout=30) == -signal.SIGKILL


def test_hang_does_not_return():
    with pytest.raises(subprocess.TimeoutExpired):
        run_fault("hang@0", timeout=2)


def test_every_kind_is_described():
    assert all(kind.description for kind in faults.FAULTS.values())
