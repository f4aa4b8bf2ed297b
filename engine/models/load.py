"""From a model's `path` to a folder on disk, its tokenizer, and a policy model on the meta device.

A path is a preset, a local Hugging Face folder or a hub id that lies in the Hugging Face cache;
nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.models.adapter_targets import resolve_targets
from fsdpbench.engine.models.demo import is_demo_model, prepare_demo_model
from fsdpbench.engine.models.facts import read_model_config, read_model_facts
from fsdpbench.engine.models.heads import PolicyModel
from fsdpbench.engine.models.lora import AdapterSettings, inject_adapters
from fsdpbench.engine.models.meta import build_meta_backbone
from fsdpbench.engine.models.preset_files import prepare_preset
from fsdpbench.engine.models.presets import PRESETS

DROPOUT_FIELDS = ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")


def resolve_path(config: TrainEngineConfig) -> Path:
    """Return the folder that `config.path` means, made first where it is a preset.

    Every rank may call it: per machine one process writes and the others wait. No communication.
    """
    path, with_weights = config.path, not config.init_from_scratch
    if is_demo_model(path) and with_weights:
        return prepare_demo_model(path)
    if path in PRESETS:
        return prepare_preset(path, with_weights=with_weights)
    folder = Path(path).expanduser()
    if path and folder.is_dir():
        return folder.resolve()
    read_model_config(path)  # says what a path may be, if this one is nothing
    return Path(snapshot_download(path, local_files_only=True))


def load_hf_config(source: Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Read the model's configuration as transformers understands it."""
    hf_config: PreTrainedConfig = AutoConfig.from_pretrained(
        source, trust_remote_code=trust_remote_code
    )
    return hf_config


def load_tokenizer(
    source: Path, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """Read the folder's tokenizer; None if it has none, as presets do."""
    if not any(source.glob("tokenizer*")) and not any(source.glob("vocab*")):
        return None
    return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)


def build_meta_model(config: TrainEngineConfig, source: Path) -> PolicyModel:
    """Build the model without storage, in training mode.

    Weights that are trained have `optimizer_dtype`. With use_lora those are the adapters, and the
    frozen base has the computation's dtype.
    """
    facts = read_model_facts(str(source))
    hf_config = load_hf_config(source, trust_remote_code=config.trust_remote_code)
    if config.disable_dropout:
        disable_dropout_of(hf_config)
    backbone, initial_values = build_meta_backbone(
        hf_config,
        getattr(torch, config.weights_dtype),
        trust_remote_code=config.trust_remote_code,
    )
    if config.disable_dropout:
        for module in backbone.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    adapters = None
    if config.use_lora:
        targets = resolve_targets(config.target_modules, facts)
        adapters = AdapterSettings(config.lora_rank, config.lora_alpha, targets)
        inject_adapters(backbone, adapters, getattr(torch, config.optimizer_dtype))
    model = PolicyModel(
        backbone,
        facts,
        logprobs_chunk_size=config.logprobs_chunk_size,
        initial_values=initial_values,
        adapters=adapters,
    )
    return model.train()


def disable_dropout_of(hf_config: PreTrainedConfig) -> None:
    """Set every dropout probability of a model's configuration to 0."""
    for name in DROPOUT_FIELDS:
        if hasattr(hf_config, name):
            setattr(hf_config, name, 0.0)
