from fsdpbench.diagnose.explain import explain_text


def wait(rank, sequence, operation, elements=64):
    return (
        f"[rank{rank}]:[E1230 12:01:1{rank}.1 P.cpp:632] [Rank {rank}] Watchdog caught "
        f"collective operation timeout: WorkNCCL(SeqNum={sequence}, OpType={operation}, "
        f"NumelIn={elements}, NumelOut={elements}, Timeout(ms)=600000) ran for 600049 milliseconds "
        "before timing out.\n"
    )


def test_the_odd_one_out_is_named():
    text = wait(0, 9, "ALLREDUCE") + wait(1, 9, "BROADCAST") + wait(2, 9, "ALLREDUCE")
    verdict = explain_text(text)
    assert verdict.rule == "nccl-collective-mismatch"
    assert verdict.root_rank == 1


def test_two_ranks_that_differ_have_no_culprit():
    verdict = explain_text(wait(0, 9, "ALLREDUCE") + wait(1, 9, "BROADCAST"))
    assert (verdict.rule, verdict.root_rank) == ("nccl-collective-mismatch", None)


def test_sizes_count_too():
    verdict = explain_text(wait(0, 9, "ALLREDUCE", 64) + wait(1, 9, "ALLREDUCE", 65))
    assert verdict.rule == "nccl-collective-mismatch"


def test_the_rank_behind_is_named():
    verdict = explain_text(
        wait(0, 9, "ALLREDUCE") + wait(1, 9, "ALLREDUCE") + wait(3, 7, "ALLGATHER")
    )
    assert (verdict.rule, verdict.root_rank) == ("nccl-rank-behind", 3)
    assert "7 to 9" in verdict.cause


def test_equal_waits_stay_a_plain_time_out():
    verdict = explain_text(wait(0, 9, "ALLREDUCE") + wait(1, 9, "ALLREDUCE"))
    assert (verdict.rule, verdict.root_rank) == ("nccl-watchdog-timeout", None)


def test_a_real_cause_beats_the_comparison():
    oom = "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    assert explain_text(wait(0, 9, "ALLREDUCE") + wait(1, 8, "BROADCAST") + oom).root_rank == 2
