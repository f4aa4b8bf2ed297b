"""Configuration and tokenizer come along."""

from __future__ import annotations

import json

import pytest
import torch

from fsdpbench.engine.checkpoint.companions import copy_companions
from fsdpbench.errors import CheckpointError


def test_companions_keep_the_configuration_and_the_tokenizer(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source, target):
        folder.mkdir()
    before = {"model_type": "llama", "torch_dtype": "float32", "hidden_size": 8}
    (source / "config.json").write_text(json.dumps(before))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "README.md"):
        (source / name).write_text("{}")
    copy_companions(source, target, torch.bfloat16)
    assert sorted(path.name for path in target.iterdir()) == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    after = json.loads((target / "config.json").read_text())
    assert after == {"model_type": "llama", "dtype": "bfloat16", "hidden_size": 8}


def test_a_source_that_is_gone_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot be copied from .*gone"):
        copy_companions(tmp_path / "gone", tmp_path, torch.float32)
