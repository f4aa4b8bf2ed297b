"""Adapters as a folder in peft's own format: `adapter_config.json` and `adapter_model.safetensors`.

The folder loads in plain peft, and in servers that take its adapters; folders that peft saved load
here if the engine can compute what they say. The base weights are not in it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from fsdpbench.engine.checkpoint.folders import ADAPTER_FILES
from fsdpbench.engine.checkpoint.manifest import Manifest, list_files, read_manifest
from fsdpbench.engine.checkpoint.recover import agree_on_checkpoint
from fsdpbench.engine.checkpoint.transaction import FolderTransaction
from fsdpbench.engine.checkpoint.verify import check_adapter
from fsdpbench.engine.parallel.adapter_values import check_adapter_file, read_adapters
from fsdpbench.engine.parallel.adapters import iterate_adapter_parameters
from fsdpbench.engine.parallel.agreement import Agreement
from fsdpbench.errors import CheckpointError, ConfigError, Violation, list_names

if TYPE_CHECKING:
    import torch

    from fsdpbench.engine.config.checkpoint import SaveLoadMeta
    from fsdpbench.engine.models.heads import PolicyModel
    from fsdpbench.engine.models.lora import AdapterSettings
    from fsdpbench.engine.setup import EngineParts

CONFIG_FILE, WEIGHTS_FILE = ADAPTER_FILES
# keys of peft's configuration that mean another computation than ours, unless they are empty
FOREIGN = (
    "use_dora",
    "use_rslora",
    "use_qalora",
    "lora_bias",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
)


def save_adapter(parts: EngineParts, meta: SaveLoadMeta, version: int) -> None:
    """Write the adapters in their own dtype; rank 0 writes all. Collective over: the world."""
    meshes = parts.meshes
    settings = require_adapters(parts.model, meta.path)
    with FolderTransaction(meta.path, meshes.cpu_group) as save:
        named = iterate_adapter_parameters(parts.model, meshes, parts.device)
        tensors = {name: tensor for name, tensor in named if tensor is not None}
        written: dict[str, int] = {}
        with Agreement("save", meshes.cpu_group):
            if tensors:
                base = name_base_model(parts.config.path, parts.source)
                write_adapter_files(save.partial, tensors, settings, base)
                written = list_files(save.partial)
        save.publish(Manifest("adapter", version, False, meshes.world_size), written)


def load_adapter(parts: EngineParts, meta: SaveLoadMeta) -> int | None:
    """Read adapters, each rank its own part; return their version, None if peft saved them.

    Checked first on every rank; if one refuses, nothing is overwritten anywhere.
    Collective over: the world.
    """
    settings = require_adapters(parts.model, meta.path)
    folder = agree_on_checkpoint(meta.path, "adapter", parts.meshes.cpu_group)
    with Agreement("load", parts.meshes.cpu_group):
        check_adapter(folder)
        check_adapter_config(folder / CONFIG_FILE, settings)
        check_adapter_file(parts.model, folder / WEIGHTS_FILE)
        manifest = read_manifest(folder)
    with Agreement("load", parts.meshes.cpu_group):
        read_adapters(parts.model, folder / WEIGHTS_FILE)
    return None if manifest is None else manifest.version


def require_adapters(model: PolicyModel, path: str) -> AdapterSettings:
    """Return the settings of the model's adapters; ConfigError if it has none."""
    if model.adapters is None:
        allowed, remedy = "this engine has no adapters", "set use_lora, or another weight_format"
        raise ConfigError([Violation("weight_format", f"'adapter' for {path}", allowed, remedy)])
    return model.adapters


def name_base_model(path: str, source: Path) -> str:
    """Return what loaders shall find the base model by: its hub id, or the folder it came from."""
    is_hub_id = path.count("/") == 1 and not Path(path).expanduser().exists()
    return path if is_hub_id else str(source)


def write_adapter_files(
    folder: Path, tensors: dict[str, torch.Tensor], settings: AdapterSettings, base_model: str
) -> None:
    """Write both files into an existing folder."""
    content = describe_adapters(settings, base_model)
    try:
        text = json.dumps(content, indent=2, sort_keys=True)
        (folder / CONFIG_FILE).write_text(f"{text}\n", encoding="utf-8")
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error


def describe_adapters(settings: AdapterSettings, base_model: str) -> dict[str, Any]:
    """Return the contents of `adapter_config.json`; what is left out has peft's default."""
    return {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,  # as peft writes it: a loader does not train unless it says so
        "init_lora_weights": True,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": settings.rank,
        "target_modules": list(settings.targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def check_adapter_config(file: Path, settings: AdapterSettings) -> None:
    """Refuse adapters that mean something else than those of this engine. Local.

    The layers are compared by the tensors' names: a name in the configuration may be a pattern.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("peft_type") != "LORA":
        raise CheckpointError(f"{file}: peft_type must be 'LORA'. Give a folder of LoRA adapters.")
    foreign = [key for key in FOREIGN if content.get(key)]
    if content.get("bias", "none") != "none":
        foreign.append("bias")
    if foreign:
        raise CheckpointError(
            f"{file}: sets {list_names(foreign)}, which this engine's adapters do not have. "
            "Merge the adapters into their base with peft and train from the merged model."
        )
    wanted = {"r": ("lora_rank", settings.rank), "lora_alpha": ("lora_alpha", settings.alpha)}
    wrong = [
        f"{key}={content.get(key)} here and {field}={value} in the engine"
        for key, (field, value) in wanted.items()
        if content.get(key) != value
    ]
    if wrong:
        raise CheckpointError(f"{file}: {'; '.join(wrong)}. Set the engine's fields to the file's.")
