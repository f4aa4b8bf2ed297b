"""Values of adapters: seeded ones, the same for every mesh, or those of a file in peft's format.

As in peft, A is uniform as in torch's `nn.Linear` and B is zero, so that an adapted model begins as
its base. Each rank makes or reads its own shards without communication.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from fsdpbench.engine.parallel.adapters import LORA_B
from fsdpbench.engine.parallel.regions import local_shard, plan_local_region
from fsdpbench.engine.parallel.seeded_weights import seed_of
from fsdpbench.errors import CheckpointError, list_names

if TYPE_CHECKING:
    from fsdpbench.engine.config.train import TrainEngineConfig
    from fsdpbench.engine.device import Device
    from fsdpbench.engine.models.heads import PolicyModel


def fill_adapters(model: PolicyModel, config: TrainEngineConfig, device: Device) -> None:
    """Give the adapters of a parallelized model, whose shards have storage, their first values.

    They follow from the seed and the names alone. A model without adapters is left as it is.
    """
    for name, parameter in model.named_adapter_parameters():
        shard = local_shard(parameter)
        if f".{LORA_B}." in name:
            shard.zero_()
            continue
        whole = draw_factor(config.seed, name, parameter.shape, device.torch_device)
        shard.copy_(whole[plan_local_region(parameter)])


def draw_factor(
    seed: int, name: str, shape: torch.Size, device: torch.device | str
) -> torch.Tensor:
    """Draw a whole A [r, in], fp32 on `device`, uniform within 1 / sqrt(in) of 0.

    Whole, since it is small: 3.5 MB for rank 32 and 28,672 inputs.
    """
    generator = torch.Generator(device).manual_seed(seed_of(seed, name, 0))
    bound = shape[1] ** -0.5  # kaiming_uniform_ with a = sqrt(5)
    return torch.empty(shape, device=device).uniform_(-bound, bound, generator=generator)


def read_adapters(model: PolicyModel, file: Path) -> None:
    """Copy this rank's region of every adapter from a safetensors file of peft.

    Raises CheckpointError naming what is missing, unexpected or of another shape; then no value has
    changed.
    """
    parameters = dict(model.named_adapter_parameters())
    try:
        with safe_open(file, framework="pt") as content:
            stored = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118
            found = {name: tuple(part.get_shape()) for name, part in stored.items()}
            check_adapter_shapes(file, found, {n: tuple(p.shape) for n, p in parameters.items()})
            for name, parameter in parameters.items():
                shard = local_shard(parameter)
                if shard.numel():
                    shard.copy_(stored[name][plan_local_region(parameter)])
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def check_adapter_shapes(
    file: Path, found: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]
) -> None:
    """Raise CheckpointError unless a file holds the adapters of the model and no others."""
    missing = [name for name in wanted if name not in found]
    unexpected = [name for name in found if name not in wanted]
    wrong = [
        f"{name} (file {list(found[name])}, model {list(shape)})"
        for name, shape in wanted.items()
        if found.get(name, shape) != shape
    ]
    problems = [
        f"{what} {list_names(names)}"
        for what, names in (
            ("missing", missing),
            ("not of this model:", unexpected),
            ("of another shape:", wrong),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{file}: {'; '.join(problems)}. Use the path, target_modules and lora_rank that the "
            "adapters were trained with."
        )
