import pytest

from fsdpbench.diagnose.stacks import Frame, read_last_stack, waits_for_others

DUMP = """step 1
Thread 0x00007f0001 (most recent call first):
  File "/a/watch.py", line 5 in run

Current thread 0x00007f0002 (most recent call first):
  File "/a/{file}", line 58 in {function}
  File "/a/worker.py", line 170 in main
"""


def test_reads_the_last_stack_of_the_main_thread(tmp_path):
    log = tmp_path / "stderr.log"
    early = DUMP.format(file="old.py", function="old")
    log.write_text(early + DUMP.format(file="faults.py", function="hang"))
    stack = read_last_stack(log)
    assert stack == [Frame("/a/faults.py", 58, "hang"), Frame("/a/worker.py", 170, "main")]
    assert str(stack[0]) == "hang (faults.py:58)"


def test_no_stack_is_an_empty_list(tmp_path):
    log = tmp_path / "stderr.log"
    log.write_text("nothing here\n")
    assert read_last_stack(log) == []
    assert read_last_stack(tmp_path / "missing") == []


@pytest.mark.parametrize(
    ("functions", "waits"),
    [
        (["all_reduce", "step"], True),
        (["wait", "x"], True),
        (["sleep", "load"], False),
        ([], False),
    ],
)
def test_knows_who_waits(functions, waits):
    assert waits_for_others([Frame("a.py", 1, name) for name in functions]) is waits
