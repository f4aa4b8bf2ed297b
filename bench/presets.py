"""Ready-made spaces, and what a sweep assumes where its space is silent.

A preset is a row: axes for a device and a world size. Defaults depend on the model alone: random
weights or real ones, tiny or large.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdpbench.bench.axes import ALL
from fsdpbench.bench.records import DeviceName
from fsdpbench.engine.models.presets import PRESETS as MODEL_PRESETS

DEFAULT_PRESET = "quick"
DEFAULT_MODELS: Mapping[DeviceName, str] = {"cpu": "tiny-qwen3", "cuda": "qwen3-0.6b"}
DEFAULT_CPU_PROCESSES = 2
MODELS_WITH_WEIGHTS = ("smollm2-135m",)
"""Presets whose real weights come with an extra; the other presets are filled at random."""

Axes = dict[str, list[Any]]


@dataclass(frozen=True)
class Preset:
    """One ready-made space."""

    summary: str
    plan_axes: Callable[[DeviceName, int], Axes]


def _list_pure_meshes(world_size: int) -> list[str]:
    """Return data parallel over everything, then the same with two tensor or context ranks."""
    meshes = [f"fsdp:d{world_size}"]
    if world_size % 2 == 0:
        meshes += [f"fsdp:d{world_size // 2}{axis}2" for axis in "ct"]
    return meshes


def _plan_quick(device: DeviceName, world_size: int) -> Axes:
    meshes = _list_pure_meshes(world_size)
    axes: Axes = {"parallel": meshes, "gradient_checkpointing": [False, True]}
    if device == "cpu":
        axes["parallel"] = list(dict.fromkeys(["fsdp:d1", *meshes]))
    else:
        axes["fsdp.offload_params"] = [False, True]
    if len(meshes) == 1:
        axes["logprobs_chunk_size"] = [256, 1024]
    return axes


def _plan_memory(device: DeviceName, world_size: int) -> Axes:
    del device
    return {
        "parallel": _list_pure_meshes(world_size),
        "gradient_checkpointing": [False, True],
        "fsdp.offload_params": [False, True],
        "fsdp.per_layer_optim_step": [False, True],
    }


def _plan_mesh(device: DeviceName, world_size: int) -> Axes:
    del device, world_size
    return {"parallel": [ALL]}


PRESETS: Mapping[str, Preset] = {
    "quick": Preset(
        "a first look: meshes x gradient checkpointing (x offload on GPUs)", _plan_quick
    ),
    "mesh": Preset("every factorisation of the world size into dp, cp and tp", _plan_mesh),
    "memory": Preset("what saves memory, and what it costs in time", _plan_memory),
}

LARGE_PARAMETERS = 20_000_000  # above this a CPU step is slow enough to make fewer and smaller ones


def has_weights(model: str) -> bool:
    """Say whether a model comes with trained weights (a folder is taken to)."""
    return model not in MODEL_PRESETS or model in MODELS_WITH_WEIGHTS


def plan_config_defaults(model: str, device: DeviceName) -> dict[str, Any]:
    """Return the TrainEngineConfig values that differ from the engine's own defaults."""
    trained = has_weights(model)
    return {
        "path": model,
        "init_from_scratch": not trained,
        "dtype": "float32" if device == "cpu" else "bfloat16",
        "optimizer": {"type": "adam", "lr": 1e-4 if trained else 1e-3},
    }


def plan_workload_defaults(num_parameters: int | None, device: DeviceName) -> dict[str, Any]:
    """Return the workload of a quick look at a model of this size."""
    if device == "cuda":
        return {"tokens_per_step": 8192, "steps": 10, "warmup_steps": 3}
    if num_parameters is not None and num_parameters > LARGE_PARAMETERS:
        return {"tokens_per_step": 256, "steps": 6, "warmup_steps": 1}
    return {"tokens_per_step": 1024, "steps": 10, "warmup_steps": 2}


DEFAULT_TIMEOUT_SECONDS: Mapping[DeviceName, float] = {"cpu": 900.0, "cuda": 1800.0}
DEFAULT_HANG_SECONDS: Mapping[DeviceName, float] = {"cpu": 180.0, "cuda": 300.0}
