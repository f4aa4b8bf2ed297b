import os

import pytest

from fsdpbench.diagnose import log_files
from fsdpbench.diagnose.explain import explain_files, explain_sources
from fsdpbench.diagnose.log_files import find_logs, is_log_name, looks_binary, open_log
from fsdpbench.errors import ConfigError

ERROR = "OSError: [Errno 28] No space left on device\n"


LOGS = [
    "train.log",
    "train.log.1",
    "TRAIN.LOG",
    "slurm-12.out",
    "slurm-12_3",
    "worker-0.err",
    "stdout",
    "stderr.txt",
    "job.o1234",
    "job.e1234",
    "nohup.out",
    "rank0.txt",
    "rank_12.txt",
    "output.txt",
    "log_rank0",
    "train_log.txt",
]
OTHERS = [
    "notes.md",
    "log_writer.py",
    "error.json",
    "logs.yaml",
    "model.bin",
    "train.log.gz",
    "catalog.txt",
    "vocab.txt",
    "README",
    "requirements.txt",
    "rank0",
    ".hidden.log",
    "data.jsonl",
    "steps.jsonl",
    "trace.json",
]


@pytest.mark.parametrize("name", [*LOGS, *OTHERS])
def test_names(name):
    assert is_log_name(name) is (name in LOGS)


@pytest.mark.parametrize(
    ("head", "binary"),
    [
        (b"", False),
        (b"plain\n", False),
        ("\u00e4\u2501".encode() * 50, False),
        ("\u00e4\u2501".encode()[:-1], False),
        (b"\0" * 900 + b"cut while it was written\n", False),
        (b"text\0more", True),
        (bytes(range(1, 256)) * 4, True),
        (b"\xff\xfe\xfd\xfc" * 20, True),
    ],
)
def test_text_and_what_is_none(head, binary):
    assert looks_binary(head) is binary


def test_a_folder_is_read_for_its_logs_alone(tmp_path, caplog):
    for name in ("README.md", "logger.py", ".venv/a.log", "env/b.log", "__pycache__/c.log"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(ERROR)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "core.out").write_bytes(b"\x7fELF\0\0" + ERROR.encode())
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "gone.log").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"no log file.*name the log files themselves"):
        find_logs(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "rank1.log").write_text("step 1 loss 2.0\n")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "stderr").write_text("hello\n")
    assert find_logs(tmp_path) == [tmp_path / "logs/stderr", tmp_path / "sub/rank1.log"]
    assert explain_sources([str(tmp_path)], None)[0].failure_class == "healthy"


def test_a_huge_log_is_read_by_its_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(log_files, "HUGE_BYTES", 3000)
    monkeypatch.setattr(log_files, "HEAD_BYTES", 1000)
    monkeypatch.setattr(log_files, "TAIL_BYTES", 1000)
    monkeypatch.setattr(log_files, "BLOCK_BYTES", 64)
    lines = [f"line {number:04}\n" for number in range(1000)]
    lines[500] = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    lines[980] = ERROR
    path = tmp_path / "a.log"
    path.write_text("".join(lines))
    with open_log(path) as stream:
        read = stream.read()
    assert read.count(b"\n") == 1000
    assert (read[:1000], read[-1000:]) == (path.read_bytes()[:1000], path.read_bytes()[-1000:])
    verdict = explain_files([path])
    assert verdict.failure_class == "storage"
    assert verdict.evidence[0].line == 981


def test_the_middle_of_a_huge_log_costs_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(log_files, "HEAD_BYTES", 1000)
    monkeypatch.setattr(log_files, "TAIL_BYTES", 1000)
    path = tmp_path / "a.log"
    with path.open("wb") as file:
        file.write(b"starting\n")
        file.truncate(300 << 20)
        file.seek(0, 2)
        file.write(b"\n" + ERROR.encode())
    verdict = explain_files([path])
    assert (verdict.failure_class, verdict.evidence[0].line) == ("storage", 3)
