from fsdpbench.diagnose.checks.machine import read_machine


def test_reads_this_machine():
    machine = read_machine()
    assert machine.num_cores >= 1
    assert machine.memory_bytes > 1 << 28
    assert (machine.num_gpus == 0) == (machine.gpu_bytes is None)
