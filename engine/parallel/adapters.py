"""Low-rank adapters over the ranks: their tensor parallelism, iteration and merge.

y = W x + s B (A x) with A [r, in] and B [out, r]. Layers are peft's and are known here by the names
of their children alone; nothing of peft is imported.

Note: adapters under tensor parallelism
Only the long dim is cut, as the base weight is; the rank is too short to share.
Column-parallel W: B is cut by rows, A is whole. Each rank computes A x of the gathered sequence and
its own output channels of B, so the gradients of A and of x are sums over the ranks: A's is reduced
when FSDP2 takes it, x's together with the base layer's when the gather of x goes back.
Row-parallel W: A is cut by columns, B is whole. A x is a sum over the ranks, reduce-scattered over
the sequence while it has r channels instead of W's output, and B's gradient is a sum over the
ranks' tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.nn import functional

from fsdpbench.engine.parallel.full_tensors import gather_full_tensor
from fsdpbench.engine.parallel.sequence import scatter_sequence_sum
from fsdpbench.engine.parallel.tensor_plans import TensorStyle

if TYPE_CHECKING:
    from fsdpbench.engine.device import Device
    from fsdpbench.engine.models.heads import PolicyModel
    from fsdpbench.engine.parallel.mesh import DeviceMeshes

ADAPTER = "default"  # peft's name of the one adapter of a model
BASE_LAYER = "base_layer"
LORA_A, LORA_B = "lora_A", "lora_B"
FILE_PREFIX = "base_model.model."  # of names in peft's adapter files


@dataclass(frozen=True)
class AdaptedLayer:
    """A linear layer with an adapter: peft's module and its parts."""

    module: nn.Module

    @property
    def base(self) -> nn.Module:
        """The layer that is adapted."""
        return self.module.get_submodule(BASE_LAYER)

    @property
    def lora_a(self) -> nn.Module:
        """The factor that makes r channels of the input, weight [r, in]."""
        return self.module.get_submodule(f"{LORA_A}.{ADAPTER}")

    @property
    def lora_b(self) -> nn.Module:
        """The factor that makes the output of r channels, weight [out, r]."""
        return self.module.get_submodule(f"{LORA_B}.{ADAPTER}")

    @property
    def scaling(self) -> float:
        """The factor of the adapter's output, alpha / rank."""
        by_adapter: Any = self.module.scaling  # peft's dict, which torch's stubs take for a tensor
        return float(by_adapter[ADAPTER])


def is_adapted(module: nn.Module) -> bool:
    """Tell whether a module is a layer with an adapter."""
    return hasattr(module, BASE_LAYER) and hasattr(module, LORA_A)


def find_adapted_layers(module: nn.Module) -> dict[str, AdaptedLayer]:
    """Map the paths of the adapted layers below a module to them."""
    return {path: AdaptedLayer(m) for path, m in module.named_modules() if is_adapted(m)}


def is_adapter_name(name: str) -> bool:
    """Tell whether a parameter's name is that of an adapter's factor."""
    return f".{LORA_A}.{ADAPTER}." in name or f".{LORA_B}.{ADAPTER}." in name


def name_in_adapter_file(name: str) -> str:
    """Return what peft's files call an adapter parameter of the causal model."""
    return FILE_PREFIX + name.replace(f".{ADAPTER}.", ".")


def name_without_adapter(name: str) -> str:
    """Return what a parameter of a base layer was called before the adapter came."""
    return name.replace(f".{BASE_LAYER}.", ".")


def apply_adapter_parallel(adapted: AdaptedLayer, style: TensorStyle, tp_mesh: DeviceMesh) -> None:
    """Cut an adapter to match its base layer's `style`, in place.

    No communication: parameters are on the meta device or equal on all ranks.
    """
    assert style in (TensorStyle.COLUMN, TensorStyle.ROW), style
    column = style is TensorStyle.COLUMN
    factors = {
        LORA_A: ShardedFactor(
            adapted.lora_a, tp_mesh, Replicate() if column else Shard(1), scatters=not column
        ),
        LORA_B: ShardedFactor(adapted.lora_b, tp_mesh, Shard(0) if column else Replicate()),
    }
    for name, factor in factors.items():
        adapted.module.get_submodule(name).add_module(ADAPTER, factor)


class ShardedFactor(nn.Module):
    """One factor of an adapter under tensor parallelism; its input and output are local tensors.

    A DTensor input is taken as whole on each rank. See the note "adapters under tensor
    parallelism".
    """

    def __init__(
        self, factor: nn.Module, mesh: DeviceMesh, placement: Placement, *, scatters: bool = False
    ) -> None:
        super().__init__()
        whole = factor.weight
        assert isinstance(whole, nn.Parameter)
        cut = distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=None)
        self.weight = nn.Parameter(cut, whole.requires_grad)
        self.scatters = scatters  # the output, from a sum over the ranks to slices of the sequence
        self.group = mesh.get_group()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by the local weight: [1, S, in] -> [1, S, out], or [1, S / tp, out]."""
        if isinstance(x, DTensor):
            x = x.to_local(grad_placements=[Partial()])
        weight = self.weight
        assert isinstance(weight, DTensor)
        whole = all(placement.is_replicate() for placement in weight.placements)
        local = weight.to_local(grad_placements=[Partial()] if whole else weight.placements)
        y = functional.linear(x, local)
        return scatter_sequence_sum(y, self.group, dim=1) if self.scatters else y


def iterate_adapter_parameters(
    model: PolicyModel,
    meshes: DeviceMeshes,
    device: Device,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield (name in peft's files, whole tensor on rank 0's CPU, None elsewhere) of each factor.

    Every rank must exhaust the iterator. Collective over: the world.
    """
    for name, parameter in model.named_adapter_parameters():
        whole = gather_full_tensor(parameter, device.torch_device)
        yield name, whole.to(dtype or whole.dtype).cpu() if meshes.rank == 0 else None
        del whole


def gather_merged_tensor(
    model: PolicyModel, name: str, device: Device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return a whole base tensor, by its Hugging Face name, with its adapter added, on every rank.

    `dtype` None keeps the base's. Tensors without an adapter come as they are. On `device`.
    Collective over: the world.
    """
    path, _, leaf = name.rpartition(".")
    owner = model.backbone.get_submodule(path)
    adapted = AdaptedLayer(owner) if is_adapted(owner) else None
    parameter = (owner if adapted is None else adapted.base).get_parameter(leaf)
    whole = gather_full_tensor(parameter, device.torch_device)
    dtype = dtype or whole.dtype
    if adapted is None or leaf != "weight":
        return whole.to(dtype)
    a, b = (
        gather_full_tensor(factor.get_parameter("weight"), device.torch_device)
        for factor in (adapted.lora_a, adapted.lora_b)
    )
    return merge_adapter(whole, a, b, adapted.scaling).to(dtype)


@torch.no_grad()
def merge_adapter(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Return weight + scaling * b @ a, fp32 [out, in], so that the caller rounds once."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scaling)
