import io
import random
import tomllib
from pathlib import Path

import pytest

from fsdpbench.diagnose.explain import explain_files, explain_sources, explain_stream, explain_text
from fsdpbench.diagnose.matching import build_matcher, keep_valid
from fsdpbench.diagnose.rules.loader import load_rules
from fsdpbench.diagnose.rules.schema import Role
from fsdpbench.errors import ConfigError

SAMPLES = Path(__file__).parent / "samples"
EXPECTED = tomllib.loads((SAMPLES / "expected.toml").read_text(encoding="utf-8"))
NAMES = sorted(EXPECTED)

# what also matches in a sample and rightly loses against the more specific cause
ALSO_MATCHES = {
    ("deepspeed-killed", "rank-killed"),
    ("host-oom-deepspeed", "rank-killed"),
    ("host-oom-dmesg", "rank-killed"),
    ("host-oom-in-load", "rank-killed"),
    ("own-attention-missing", "config-error"),
    ("ray-task-oom-late", "cuda-oom"),
}


def read_sample(name):
    return (SAMPLES / f"{name}.log").read_text(encoding="utf-8")


def find_hits(name):
    matcher = build_matcher()
    summary = matcher.scanner.scan(io.BytesIO(read_sample(name).encode()), name)
    matcher.findings.logs[name] = summary
    return keep_valid(matcher.findings.hits, matcher.findings)


def test_every_sample_has_an_expected_answer():
    assert sorted(path.stem for path in SAMPLES.glob("*.log")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_answers_a_sample(name):
    verdict = explain_files([SAMPLES / f"{name}.log"])
    expected = EXPECTED[name]
    assert verdict.failure_class == expected["class"]
    assert verdict.rule == expected.get("rule")
    assert verdict.root_rank == expected.get("rank")
    assert verdict.phase == expected.get("phase")
    assert "{" not in verdict.cause.replace("{torch", "")
    if verdict.failure_class not in ("healthy", "unknown"):
        assert verdict.remedies
        assert verdict.confidence > 0
        lines = read_sample(name).splitlines()
        first = verdict.evidence[0]
        assert first.text.split(" [...]")[0][:40].split("<redacted>")[0] in lines[first.line - 1]


@pytest.mark.parametrize("name", NAMES)
def test_no_rule_of_another_class_fires(name):
    causes = [hit.rule for hit in find_hits(name) if hit.rule.role is Role.CAUSE]
    strangers = {rule.id for rule in causes if rule.failure_class != EXPECTED[name]["class"]}
    assert {(name, stranger) for stranger in strangers} <= ALSO_MATCHES


def test_every_rule_has_a_sample():
    seen = {hit.rule.id for name in NAMES for hit in find_hits(name)}
    assert seen == {rule.id for rule in load_rules()}


@pytest.mark.parametrize(
    ("row", "failure_class", "remedy"),
    [
        ("mesh-world-size", "mesh", "dp * cp * tp"),
        ("oom-forward", "cuda_oom", "offload_params: true"),
        ("titan-retries", "performance", "more sharding"),
        ("areal-update-weights", "weight_sync", "weight_update_mode: disk"),
        ("dcp-no-metadata", "checkpoint", "weight_format: hf"),
    ],
)
def test_rows_of_the_troubleshooting_table(row, failure_class, remedy):
    verdict = explain_text(read_sample(row))
    assert verdict.failure_class == failure_class
    assert remedy in verdict.remedies[0] + verdict.remedies[-1]


@pytest.mark.parametrize("seed", range(4))
def test_interleaved_ranks_are_told_apart(seed):
    """The rank that died last in the file is found, whatever the others print in between."""
    rng = random.Random(seed)
    died = read_sample("oom-forward").splitlines()
    noticed = [
        "[rank{r}]: Traceback (most recent call last):",
        "[rank{r}]:     work.wait()",
        "[rank{r}]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
        "Connection closed by peer [10.0.0.5]:19858.",
    ]
    queues = [list(died)] + [[text.format(r=rank) for text in noticed] for rank in (0, 1, 2)]
    mixed = []
    while any(queues):
        mixed.append(rng.choice([queue for queue in queues if queue]).pop(0))
    verdict = explain_text("\n".join(mixed))
    assert (verdict.failure_class, verdict.root_rank) == ("cuda_oom", 5)
    assert verdict.phase == "forward"


def test_first_cause_over_files_by_the_clock(tmp_path):
    late = tmp_path / "rank0.log"
    late.write_text("2026-11-30 10:05:00,000 ERROR RuntimeError: CUDA error: out of memory\n")
    first = tmp_path / "rank3.log"
    first.write_text("2026-11-30 10:04:00,000 ERROR OSError: [Errno 28] No space left on device\n")
    verdict = explain_files([late, first])
    assert (verdict.failure_class, verdict.root_rank) == ("storage", 3)


def test_unknown_exception_before_the_symptoms_is_said_and_not_guessed():
    verdict = explain_text(read_sample("rank-raised-unknown"))
    assert verdict.failure_class == "unknown"
    assert "rank 1" in verdict.cause
    assert "bad sample 17" in verdict.cause
    assert verdict.evidence[0].text.endswith("ValueError: bad sample 17")


def test_cut_logs_never_name_another_class():
    for name in ("kill", "mesh", "segfault"):
        sample = next(n for n in NAMES if name in n and EXPECTED[n]["class"] != "unknown")
        text = read_sample(sample)
        for part in range(1, 10):
            head = explain_text(text[: len(text) * part // 10])
            tail = explain_text(text[len(text) * part // 10 :])
            allowed = {EXPECTED[sample]["class"], "unknown", "healthy", "nccl", "rank_death"}
            assert {head.failure_class, tail.failure_class} <= allowed


def test_a_handled_error_is_no_failure():
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    steps = "".join(f"step {step} loss 2.0\n" for step in range(300))
    assert explain_text(error + steps).rule == "error-survived"
    assert explain_text(error + steps + error).failure_class == "cuda_oom"
    assert explain_text(steps + error).failure_class == "cuda_oom"


@pytest.mark.parametrize("text", ["", "\n\n\n", "hello\n"])
def test_logs_that_say_nothing(text):
    assert explain_text(text).failure_class == "unknown"


def test_random_bytes_and_long_lines_do_no_harm():
    rng = random.Random(7)
    noise = rng.randbytes(300_000)
    verdict = explain_stream(io.BytesIO(noise + b"\n" + noise), "noise")
    assert verdict.failure_class == "unknown"
    error = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. "
    line = b"x" * 3_000_000 + error + b"y" * 3_000_000
    assert explain_stream(io.BytesIO(line), "long").failure_class == "cuda_oom"


def test_a_long_line_does_not_shift_line_numbers():
    text = "a" * 5_000_000 + "\n" + "b\n" * 9 + "OSError: [Errno 28] No space left on device\n"
    assert explain_text(text).evidence[0].line == 11


def test_secrets_do_not_come_out():
    verdict = explain_text(read_sample("secrets"))
    shown = verdict.model_dump_json()
    assert "hunter2" not in shown
    assert "abcdef123456" not in shown
    assert "<redacted>" in shown


def test_sources_of_the_command_line(tmp_path):
    (tmp_path / "a.log").write_text("step 1 loss 2.0\n")
    (tmp_path / "b.log").write_text("OSError: [Errno 28] No space left on device\n")
    empty = io.BytesIO()
    assert explain_sources([str(tmp_path)], empty)[0].failure_class == "storage"
    assert explain_sources(["-"], io.BytesIO(b"step 1 loss 2\n"))[0].failure_class == "healthy"
    twice = ["-", "-", str(tmp_path / "a.log")]
    assert explain_sources(twice, io.BytesIO(b"step 1 loss 2\n"))[0].failure_class == "healthy"
    with pytest.raises(ConfigError, match="standard input is closed"):
        explain_sources(["-"], None)
    both = [str(tmp_path / "a.log"), str(tmp_path / "b.log")]
    assert explain_sources(both, empty)[0].failure_class == "storage"
    with pytest.raises(FileNotFoundError):
        explain_sources([str(tmp_path / "missing.log")], empty)
