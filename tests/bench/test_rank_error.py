import errno
import json

import pytest
import torch

from fsdpbench.bench.folders import TrialFolder
from fsdpbench.bench.measurement import Measurement, Peaks
from fsdpbench.bench.rank_error import (
    PHASES_BY_FUNCTION,
    RankErrors,
    find_phase,
    name_exhausted_memory,
    names_lost_peer,
    save_first_outcome,
    summarise_error,
)
from fsdpbench.bench.records import TrialSpec, WorkerOutcome
from fsdpbench.engine import setup, step
from fsdpbench.engine.optim import clip
from fsdpbench.errors import PeerError


@pytest.fixture
def folder(tmp_path):
    trial = TrialFolder(tmp_path / "trial")
    trial.create(TrialSpec(id="t", config={}))
    return trial


def catch(function, *arguments):
    try:
        function(*arguments)
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("error", "exhausted"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "device"),
        (RuntimeError("CUDA error: out of memory\nCompile with"), "device"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "device"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you"), "host"),
        (MemoryError(), "host"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "host"),
        (OSError(errno.ENOSPC, "No space left on device"), None),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), None),
        (ValueError("CUDA out of memory"), None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_names_the_memory_that_ran_out(error, exhausted):
    assert name_exhausted_memory(error) == exhausted


def test_a_real_allocation_failure_is_recognised():
    error = catch(lambda: torch.empty(1 << 52, dtype=torch.uint8))
    assert name_exhausted_memory(error) == "host"


def test_lost_peers():
    closed = "[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:12946."
    assert names_lost_peer(RuntimeError(closed))
    assert names_lost_peer(PeerError("initialize failed on rank 1: OSError: disk"))
    assert not names_lost_peer(RuntimeError("shape mismatch"))
    assert not names_lost_peer(ValueError(closed))


def run_forward():
    raise ValueError("below")


def gradient_norm():
    raise ValueError("below")


def apply_optimizer_step():
    gradient_norm()


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        run_forward()


def test_phase_is_read_from_the_functions_an_error_passed():
    assert find_phase(catch(run_forward).__traceback__) == "forward"
    assert find_phase(catch(apply_optimizer_step).__traceback__) == "clip"
    assert find_phase(catch(int, "x").__traceback__) is None
    assert find_phase(None) is None


def test_a_forward_that_is_recomputed_belongs_to_backward():
    loss = Recompute.apply(torch.ones(1, requires_grad=True))
    assert find_phase(catch(loss.backward).__traceback__) == "backward"


def test_phase_functions_exist_in_the_engine():
    names = {name for module in (setup, step, clip) for name in vars(module)}
    assert set(PHASES_BY_FUNCTION) - {"backward"} <= names


def test_summary_is_one_line():
    error = torch.OutOfMemoryError("CUDA out of memory.\nSee documentation")
    assert summarise_error(error, 3, "forward", 7) == (
        "rank 3, forward, step 7: torch.OutOfMemoryError: CUDA out of memory."
    )
    assert summarise_error(ValueError(), 0, "start", None) == "rank 0, start: ValueError"


def fail(folder, rank, error):
    errors = RankErrors(folder, rank)
    errors.measure_memory = lambda: {"rss_bytes": 5}
    errors.describe = lambda: Measurement(peaks=[Peaks(peak_host_bytes=7)])
    with errors:
        errors.enter("step", 4)
        raise error


def test_last_words_of_a_rank(folder):
    error = catch(fail, folder, 2, MemoryError("none left"))
    assert isinstance(error, MemoryError)  # it goes on after it was written down
    words = json.loads((folder.path / "errors" / "rank2.json").read_text())
    assert words["type"] == "builtins.MemoryError"
    assert words["message"] == "none left"
    assert "in fail" in words["traceback"]
    assert (words["rank"], words["phase"], words["step"]) == (2, "step", 4)
    assert words["exhausted_memory"] == "host"
    assert words["memory"] == {"rss_bytes": 5}
    outcome = folder.load_outcome()
    assert outcome.status == "host_oom"
    assert outcome.error == "rank 2, step, step 4: MemoryError: none left"
    assert outcome.peak_host_bytes == 7
    (beat,) = folder.read_heartbeats()
    assert (beat.rank, beat.phase, beat.step) == (2, "step", 4)


def test_the_first_failure_is_the_trials(folder):
    catch(fail, folder, 1, ValueError("root"))
    catch(fail, folder, 0, ValueError("consequence"))
    assert folder.load_outcome().error == "rank 1, step, step 4: ValueError: root"
    assert (folder.path / "errors" / "rank0.json").exists()
    assert [path.name for path in folder.path.glob(".*")] == []


def test_a_lost_peer_is_no_outcome(folder):
    catch(fail, folder, 0, RuntimeError("Connection closed by peer"))
    assert json.loads((folder.path / "errors" / "rank0.json").read_text())["lost_peer"] is True
    assert folder.load_outcome() is None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_being_ended_is_no_failure(folder, error):
    catch(fail, folder, 0, error)
    assert not (folder.path / "errors").exists()
    assert folder.load_outcome() is None


def test_no_error_no_words(folder):
    with RankErrors(folder, 0) as errors:
        errors.enter("start")
    assert not (folder.path / "errors").exists()


def test_only_the_first_outcome_stands(folder):
    assert save_first_outcome(folder, WorkerOutcome(error="first"))
    assert not save_first_outcome(folder, WorkerOutcome(error="second"))
    assert folder.load_outcome().error == "first"
