import pytest

from fsdpbench.diagnose.redact import HIDDEN, redact


@pytest.mark.parametrize(
    "secret",
    [
        "HF_TOKEN=hunter2hunter2",
        "WANDB_API_KEY: hunter2hunter2",
        "export AWS_SECRET_ACCESS_KEY=hunter2hunter2",
        '"password": "hunter2hunter2"',
        "{'api_key': 'hunter2hunter2', 'a': 1}",
        "Authorization: Bearer hunter2hunter2",
        "https://user:hunter2hunter2@host/path",
        "postgres://hunter2hunter2@host",
        "https://host/file?X-Amz-Signature=hunter2hunter2&x=1",
        "--hf-token hunter2hunter2",
        "--wandb-api-key hunter2hunter2 --lr 1",
        "DB_PASSWD='hunter2hunter2'",
        "secret=hunter2hunter2",
        "hf_hunter2hunter2hunter2",
        "ghp_hunter2hunter2hunter2hunter2hunter2",
        "sk-hunter2hunter2hunter2",
        "Bearer hunter2hunter2",
    ],
)
def test_secrets_go(secret):
    shown = redact(f"before {secret} after")
    assert "hunter2" not in shown
    assert HIDDEN in shown
    assert shown.startswith("before ")


@pytest.mark.parametrize(
    "text",
    [
        "num_tokens=1024 tokens_per_second: 1234",
        "max_tokens_per_mb: 4096",
        "pad_token=<pad> eos_token='<|im_end|>'",
        "token: 17",
        "path /ckpt/step_10 at node:29500",
        "loss=2.31 lr: 1e-5 tokenizer=qwen",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "secretary of state",
    ],
)
def test_ordinary_text_stays(text):
    assert redact(text) == text
