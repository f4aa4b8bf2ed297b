"""Values of adapters: seeded ones, the same for every mesh, or those of a file in peft's format.

As in peft, A is uniform as in torch's `nn.Linear` and B is zero, so that an adapted model begins as
its base. Each rank makes or reads its own shards without communication.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from fsdpbench.engine.parallel.adapters import LORA_B
from fsdpbench.engine.parallel.regions import local_shard, plan_local_region
from fsdpbench.engine.parallel.seeded_weights import seed_of
from fsdpbench.engine.parallel.weight_files import describe_mismatch
from fsdpbench.errors import CheckpointError

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


def check_adapter_file(model: PolicyModel, file: Path) -> None:
    """Raise CheckpointError unless a safetensors file holds the model's adapters and no others."""
    wanted = {name: parameter.shape for name, parameter in model.named_adapter_parameters()}
    with open_adapter_file(file) as content:
        names = content.keys()
        found = {name: torch.Size(content.get_slice(name).get_shape()) for name in names}
    problems = describe_mismatch(wanted, found)
    if problems:
        raise CheckpointError(
            f"{file}: {'; '.join(problems)}. Use the path, target_modules and lora_rank that the "
            "adapters were trained with."
        )


def read_adapters(model: PolicyModel, file: Path) -> None:
    """Copy this rank's region of every adapter from a file that `check_adapter_file` accepts."""
    with open_adapter_file(file) as content:
        for name, parameter in model.named_adapter_parameters():
            shard = local_shard(parameter)
            if shard.numel():  # a rank may hold nothing of a factor with few rows
                shard.copy_(content.get_slice(name)[plan_local_region(parameter)])


@contextmanager
def open_adapter_file(file: Path) -> Iterator[Any]:  # safetensors' class is not typed
    """Open a safetensors file; whatever is wrong with it becomes a CheckpointError."""
    try:
        with safe_open(file, framework="pt") as content:
            yield content
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
