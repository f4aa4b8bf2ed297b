"""The small files that make a folder of weights a model: configuration, tokenizer, templates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from fsdpbench.errors import CheckpointError

PATTERNS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "*.py",
)


def copy_companions(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Copy config.json, its dtype set to what was written, and the tokenizer's files."""
    try:
        content = json.loads((source / "config.json").read_text(encoding="utf-8"))
        content.pop("torch_dtype", None)
        content["dtype"] = str(dtype).removeprefix("torch.")
        text = json.dumps(content, indent=2)
        (target / "config.json").write_text(f"{text}\n", encoding="utf-8")
        for pattern in PATTERNS:
            for file in source.glob(pattern):
                if file.is_file():
                    shutil.copyfile(file, target / file.name)
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{target}: configuration and tokenizer cannot be copied from {source}: {error}"
        ) from error
