"""Tensor and sequence parallelism on a transformers causal model, by its family's plan.

Works on parameters of the meta device as well as on real ones. Which module gets which style is
data in `tensor_plans`; here styles become torch's, and tied weights stay one parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fsdpbench.engine.parallel.adapters import (
    BASE_LAYER,
    apply_adapter_parallel,
    find_adapted_layers,
)
from fsdpbench.engine.parallel.styles import GatherSequenceInput, ReplicateParallel
from fsdpbench.engine.parallel.tensor_plans import TensorStyle, plan_layer, plan_model
from fsdpbench.errors import ConfigError, Violation, list_names

if TYPE_CHECKING:
    from fsdpbench.engine.models.families import Family


def apply_tensor_parallel(backbone: nn.Module, tp_mesh: DeviceMesh, family: Family) -> None:
    """Shard a causal model over `tp_mesh` in place; hidden states become sequence shards.

    No communication: parameters are on the meta device or equal on all ranks. Afterwards the base
    model returns its slice of the sequence, and the head's weight is a slice of the vocabulary.
    """
    shared = find_tied_parameters(backbone)
    frozen = [name for name, p in backbone.named_parameters() if not p.requires_grad]
    parallelize_module(backbone, tp_mesh, build_styles(plan_model(family)))
    for layer in backbone.get_submodule(family.layers).children():
        plan, adapted = plan_layer(family), find_adapted_layers(layer)
        bases = {f"{p}.{BASE_LAYER}" if p in adapted else p: style for p, style in plan.items()}
        parallelize_module(layer, tp_mesh, build_styles(bases))
        for path, adapted_layer in adapted.items():
            apply_adapter_parallel(adapted_layer, plan[path], tp_mesh)
    tie_parameters(backbone, shared)
    for name in frozen:  # some of torch's styles make parameters anew, which then require gradients
        backbone.get_parameter(name).requires_grad_(False)
    plain = [n for n, p in backbone.named_parameters() if not isinstance(p, DTensor)]
    if plain:
        raise ConfigError(
            [
                Violation(
                    "tensor_parallel_size",
                    str(tp_mesh.size()),
                    f"the plan of family {family.model_type} leaves out {list_names(plain)}",
                    "add the modules to the family's row, or set tensor_parallel_size to 1",
                )
            ]
        )


# The guide's name.
apply_non_moe_tp = apply_tensor_parallel


def build_styles(plan: Mapping[str, TensorStyle]) -> dict[str, ParallelStyle]:
    """Translate a plan to torch's styles."""
    builders: dict[TensorStyle, Callable[[], ParallelStyle]] = {
        TensorStyle.VOCABULARY_IN: lambda: RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1)
        ),
        TensorStyle.VOCABULARY_OUT: lambda: ColwiseParallel(use_local_output=False),
        TensorStyle.SEQUENCE: lambda: SequenceParallel(use_local_output=True),
        # The norm is over head_dim alone, so it does not matter which other dim is said to be cut.
        TensorStyle.HEADS: ReplicateParallel,
        TensorStyle.GATHER: GatherSequenceInput,
        TensorStyle.COLUMN: ColwiseParallel,
        TensorStyle.ROW: lambda: RowwiseParallel(output_layouts=Shard(1)),
    }
    return {path: builders[style]() for path, style in plan.items()}


def find_tied_parameters(module: nn.Module) -> list[list[str]]:
    """List the names of each parameter that has more than one."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [group for group in names.values() if len(group) > 1]


def tie_parameters(module: nn.Module, shared: list[list[str]]) -> None:
    """Make all names of each group mean the parameter of the first."""
    for first, *others in shared:
        parameter = module.get_parameter(first)
        for name in others:
            owner, _, leaf = name.rpartition(".")
            module.get_submodule(owner).register_parameter(leaf, parameter)
