"""The ranks as a grid: process groups and device meshes of one engine, and nothing else about it.

Rank r stands at (dp, cp, tp) with tp fastest: r = (dp * cp_size + cp) * tp_size + tp. Parameters
live on the two-axis mesh ("fsdp", "tp"), where "fsdp" is dp x cp flattened; the three-axis mesh
("dp", "cp", "tp") is a view of the same ranks for callers. Nothing is kept at module level, so
engines of different meshes stand side by side in one process.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

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
    cpu_group: dist.ProcessGroup  # the world on the host: bookkeeping passes the device's queue
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
        for mesh in (self.world, self.fsdp, self.tp):
            if mesh is not None:
                release_groups(mesh)


# The guide's name for the object that builds the mesh and checks the degrees.
ParallelHelper = DeviceMeshes


def release_groups(mesh: DeviceMesh) -> None:
    """Let go of a mesh's groups, which live on with their threads and descriptors otherwise.

    torch's caches keep every mesh that tensors were sharded over, and the mesh a table of groups.
    """
    find_root = getattr(mesh, "_get_root_mesh", lambda: mesh)  # private: may be absent one day
    getattr(find_root(), "_pg_registry", {}).clear()  # only torch.compile reads it


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


# Note [Axis names are unique]
# torch keeps process-wide caches (DTensor's sharding propagation) keyed by meshes, and meshes
# compare by ranks and axis names, not by groups. An engine built later over the same ranks would be
# handed the mesh of an earlier one out of such a cache, and with it groups that may be gone. The
# parameters' mesh therefore has a tag in its axis names that no other mesh of the process has.


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
    dp_rank, cp_rank, tp_rank = rank // (cp * tp), rank // tp % cp, rank % tp
    groups = GroupFactory()
    dp_rows = grid.permute(1, 2, 0).reshape(cp * tp, dp)
    fsdp_group = groups.device_group("fsdp", grid.permute(2, 0, 1).reshape(tp, dp * cp))
    tp_group = groups.device_group("tp", grid.reshape(dp * cp, tp))
    dp_group = groups.device_group("dp", dp_rows)
    cp_group = groups.device_group("cp", grid.permute(0, 2, 1).reshape(dp * tp, cp))
    tag = uuid.uuid4().hex[:8]  # see Note [Axis names are unique]
    fsdp_axis, tp_axis = f"fsdp_{tag}", f"tp_{tag}"
    if tp > 1:
        parameters = DeviceMesh.from_group(
            [fsdp_group, tp_group],
            device_type,
            mesh=grid.view(dp * cp, tp),
            mesh_dim_names=(fsdp_axis, tp_axis),
        )
    else:
        parameters = DeviceMesh.from_group(
            fsdp_group, device_type, mesh=grid.flatten(), mesh_dim_names=(fsdp_axis,)
        )
    return DeviceMeshes(
        strategy=strategy,
        device_type=device_type,
        world=DeviceMesh.from_group(
            [dp_group, cp_group, tp_group],
            device_type,
            mesh=grid,
            mesh_dim_names=("dp", "cp", "tp"),
        ),
        fsdp=parameters[fsdp_axis] if tp > 1 else parameters,
        tp=parameters[tp_axis] if tp > 1 else None,
        dp_group=dp_group,
        cp_group=cp_group,
        tp_group=tp_group,
        fsdp_group=fsdp_group,
        model_parallel_group=groups.device_group("cp_tp", grid.reshape(dp, cp * tp)),
        cpu_group=groups.host_group("world_host", grid.reshape(1, -1), host_backend),
        dp_cpu_group=groups.host_group("dp_host", dp_rows, host_backend),
        dp_rank=dp_rank,
        cp_rank=cp_rank,
        tp_rank=tp_rank,
        own_groups=tuple(groups.made),
    )


class GroupFactory:
    """Makes groups by their rows of ranks; a group over ranks that have one already is that one.

    Sharing matters on GPUs, where every communicator in use costs hundreds of MiB. A group over all
    ranks is the default group.
    """

    def __init__(self) -> None:
        self.made: list[dist.ProcessGroup] = []
        self._by_ranks: dict[tuple[str, tuple[tuple[int, ...], ...]], dist.ProcessGroup] = {}

    def device_group(self, name: str, rows: torch.Tensor) -> dist.ProcessGroup:
        """Return this rank's group among `rows` [groups, ranks]. Collective over: the world."""
        if rows.shape[0] == 1:
            world = dist.group.WORLD
            assert world is not None  # the caller has a default group
            return world
        return self._make(name, rows, None)

    def host_group(self, name: str, rows: torch.Tensor, backend: str) -> dist.ProcessGroup:
        """Return this rank's group for tensors in host memory. Collective over: the world."""
        return self._make(name, rows, backend)

    def _make(self, name: str, rows: torch.Tensor, backend: str | None) -> dist.ProcessGroup:
        # the rows of one call partition the world, so all ranks agree on whether they are at hand
        key = (backend or "", tuple(map(tuple, rows.tolist())))
        if key not in self._by_ranks:
            for ranks in rows.tolist():
                group = dist.new_group(ranks, backend=backend, group_desc=name)
                if dist.get_rank() in ranks:
                    self._by_ranks[key] = group
                    self.made.append(group)
        return self._by_ranks[key]
