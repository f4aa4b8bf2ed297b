"""Presets as Hugging Face folders: config.json alone, or with seeded random weights.

Folders are named by their content and appear whole or not at all. The weights are drawn tensor by
tensor, the same as `init_from_scratch` draws them on the CPU with seed 1.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from transformers import AutoConfig

from fsdpbench.engine.models.demo import build_once
from fsdpbench.engine.models.meta import build_meta_backbone
from fsdpbench.engine.models.presets import PRESETS
from fsdpbench.engine.models.shard_writer import ShardWriter, plan_weight_files, write_index
from fsdpbench.engine.parallel.regions import plan_region
from fsdpbench.engine.parallel.seeded_weights import SeededWeights
from fsdpbench.settings import cache_dir

PRESET_SEED = 1
LAYOUT_VERSION = 1  # part of the folder's name: raise it when the drawing or the files change


def prepare_preset(name: str, *, with_weights: bool) -> Path:
    """Return the folder of a preset, writing it first if this machine has not yet.

    Safe to call from every process at once: one writes, the others wait for it.
    """
    content = f"{LAYOUT_VERSION}:{PRESET_SEED}:{json.dumps(PRESETS[name], sort_keys=True)}"
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    folder = cache_dir() / "presets" / f"{name}-{digest}{'' if with_weights else '-bare'}"
    build_once(folder, lambda partial: write_preset(name, partial, with_weights))
    return folder


def write_preset(name: str, folder: Path, with_weights: bool) -> None:
    """Write config.json and, if asked for, the weights in the preset's own dtype."""
    folder.mkdir(parents=True)
    text = json.dumps(PRESETS[name], indent=2)
    (folder / "config.json").write_text(f"{text}\n", encoding="utf-8")
    if with_weights:
        _write_weights(folder, getattr(torch, PRESETS[name]["torch_dtype"]))


def _write_weights(folder: Path, dtype: torch.dtype) -> None:
    hf_config = AutoConfig.from_pretrained(folder)
    backbone, initial_values = build_meta_backbone(hf_config, dtype)
    source = SeededWeights(
        PRESET_SEED, hf_config.initializer_range, torch.device("cpu"), initial_values
    )
    shapes = {name: parameter.shape for name, parameter in backbone.named_parameters()}
    file_of = plan_weight_files(shapes, dtype)
    writer = ShardWriter(folder, file_of, shapes, dtype)
    try:
        for name, shape in shapes.items():
            writer.add(name, source.read(name, shape, plan_region(shape, ())).to(dtype))
        writer.finish()
    finally:
        writer.abandon()
    write_index(folder, file_of, shapes, dtype)
