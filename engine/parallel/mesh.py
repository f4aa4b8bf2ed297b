"""The ranks as a grid: process groups and device meshes of one engine, and nothing else about it.

Rank r stands at (dp, cp, tp) with tp fastest: r = (dp * cp_size + cp) * tp_size + tp. Parameters
live on the two-axis mesh ("fsdp", "tp"), where "fsdp" is dp x cp flattened; the three-axis mesh
("dp", "cp", "tp") is a view of the same ranks for callers. Nothing is kept at module level, so
engines of different meshes stand side by side in one process.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdpbench.engine.config.parallel import ParallelStrategy
from fsdpbench.errors import TopologyError, Violation


@dataclass(frozen=True)
class DeviceMeshes:
    """Groups and meshes of one engine. Groups of one rank exist too: callers need not ask."""

    strategy: ParallelStrategy
    device_type: str
    world: DeviceMesh  # axes "dp", "cp", "tp"
    fsdp: DeviceMesh  # one axis: dp x cp flattened; parameters are sharded over it
    tp: DeviceMesh | None  # one axis; None when tensor parallelism is off
    dp_group: dist.ProcessGroup  # ranks that see different sequences
    cp_group: dist.ProcessGroup  # ranks that share a packed row
    tp_group: dist.ProcessGroup  # ranks that share each matrix
    fsdp_group: dist.ProcessGroup
    model_parallel_group: dist.ProcessGroup  # cp x tp: ranks that are fed the same batch
    cpu_group: (
        dist.ProcessGroup
    )  # the world on the host; carries bookkeeping past the device's queue
    dp_cpu_group: dist.ProcessGroup  # the dp axis on the host
    dp_rank: int
    cp_rank: int
    tp_rank: int
    own_groups: tuple[dist.ProcessGroup, ...]  # what `destroy` releases

    @property
    def dp_size(self) -> int:
        """Data-parallel degree."""
        return self.strategy.dp_size

    @property
    def cp_size(self) -> int:
        """Context-parallel degree."""
        return self.strategy.cp_size

    @property
    def tp_size(self) -> int:
        """Tensor-parallel degree."""
        return self.strategy.tp_size

    @property
    def fsdp_size(self) -> int:
        """Ranks over which each parameter is sharded: dp x cp."""
        return self.dp_size * self.cp_size

    @property
    def rank(self) -> int:
        """Rank in the world that the meshes span."""
        return (self.dp_rank * self.cp_size + self.cp_rank) * self.tp_size + self.tp_rank

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.fsdp_size * self.tp_size

    @property
    def is_data_parallel_head(self) -> bool:
        """Whether this rank speaks for its data-parallel index."""
        return self.cp_rank == 0 and self.tp_rank == 0

    @property
    def data_parallel_head(self) -> int:
        """World rank of this data-parallel index's head."""
        return self.dp_rank * self.cp_size * self.tp_size

    def destroy(self) -> None:
        """Release the groups made for these meshes; groups of others and the world stay.

        Collective over: the world.
        """
        for group in self.own_groups:
            # a world torn down before this call took its groups along
            if dist.is_initialized() and is_live(group):
                dist.destroy_process_group(group)


# The guide's name for the object that builds the mesh and checks the degrees.
ParallelHelper = DeviceMeshes


def is_live(group: dist.ProcessGroup) -> bool:
    """Tell whether the group is still registered in this process."""
    try:
        dist.get_process_group_ranks(group)
    except KeyError:  # torch's answer for a group that was destroyed
        return False
    return True


def check_world_size(strategy: ParallelStrategy, world_size: int) -> None:
    """Refuse degrees whose product is not the world size."""
    if strategy.world_size == world_size:
        return
    dp, cp, tp = strategy.dp_size, strategy.cp_size, strategy.tp_size
    found = f"{dp} x {cp} x {tp} = {strategy.world_size}"
    raise TopologyError(
        [
            Violation(
                "data_parallel_size x context_parallel_size x tensor_parallel_size",
                found,
                f"must equal the world size {world_size}",
                f"launch {strategy.world_size} processes or change the degrees",
            )
        ]
    )


def build_meshes(
    strategy: ParallelStrategy, device_type: str, *, host_backend: str = "gloo"
) -> DeviceMeshes:
    """Build groups and meshes over the default process group. Collective over: the world.

    `host_backend` serves the two host groups; a simulated world names its own.
    """
    check_world_size(strategy, dist.get_world_size())
    dp, cp, tp = strategy.dp_size, strategy.cp_size, strategy.tp_size
    grid = torch.arange(dp * cp * tp, device="cpu").view(dp, cp, tp)
    rank = dist.get_rank()
    parameters = init_device_mesh(device_type, (dp * cp, tp), mesh_dim_names=("fsdp", "tp"))
    fsdp_group, tp_group = parameters.get_group("fsdp"), parameters.get_group("tp")
    made = [fsdp_group, tp_group]

    def subgroup(rows: torch.Tensor, backend: str | None = None) -> dist.ProcessGroup:
        own, _ = dist.new_subgroups_by_enumeration(rows.tolist(), backend=backend)
        made.append(own)
        return own

    # A group that equals one at hand is shared: every NCCL communicator costs device memory.
    dp_rows = grid.permute(1, 2, 0).reshape(cp * tp, dp)
    dp_group = fsdp_group if cp == 1 else subgroup(dp_rows)
    cp_group = fsdp_group if dp == 1 else subgroup(grid.permute(0, 2, 1).reshape(dp * tp, cp))
    if cp == 1:
        model_parallel_group = tp_group
    else:
        model_parallel_group = cp_group if tp == 1 else subgroup(grid.reshape(dp, cp * tp))
    cpu_group = subgroup(grid.reshape(1, -1), host_backend)
    dp_cpu_group = cpu_group if cp * tp == 1 else subgroup(dp_rows, host_backend)
    world = DeviceMesh.from_group(
        [dp_group, cp_group, tp_group], device_type, mesh=grid, mesh_dim_names=("dp", "cp", "tp")
    )
    return DeviceMeshes(
        strategy=strategy,
        device_type=device_type,
        world=world,
        fsdp=parameters["fsdp"],
        tp=parameters["tp"] if tp > 1 else None,
        dp_group=dp_group,
        cp_group=cp_group,
        tp_group=tp_group,
        fsdp_group=fsdp_group,
        model_parallel_group=model_parallel_group,
        cpu_group=cpu_group,
        dp_cpu_group=dp_cpu_group,
        dp_rank=rank // (cp * tp),
        cp_rank=rank // tp % cp,
        tp_rank=rank % tp,
        own_groups=tuple(group for group in made if group is not dist.group.WORLD),
    )
