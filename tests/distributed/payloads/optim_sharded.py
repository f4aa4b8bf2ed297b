"""Optimizers and gradient norms over DTensors, against full tensors and plain torch optimizers."""

from __future__ import annotations

import math
import uuid

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fsdpbench.engine.config.optimizer import OptimizerConfig
from fsdpbench.engine.optim.build import build_optimizer
from fsdpbench.engine.optim.clip import fsdp2_clip_grad_norm, gradient_norm, plan_clipping

TP = 2  # the other axis takes the rest of the ranks
STEPS = 4
MAX_NORM = 0.05  # below every norm here, so clipping acts in each step


class Net(torch.nn.Module):
    """Sizes that no world size divides, a normalisation and a lone scalar-like weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(7, 10)
        self.norm = torch.nn.LayerNorm(7)
        self.down = torch.nn.Linear(10, 3, bias=False)
        self.gain = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x)))) * self.gain


def build_net(device: str, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(1)
    return Net().to(device=device, dtype=dtype)


def build_mesh(device: str, *shape: int) -> list[DeviceMesh]:
    """Build a mesh and its axes; names are fresh.

    DTensor's caches take meshes of equal ranks and names for one, and hand out that of an earlier
    call, whose groups are gone.
    """
    tag = uuid.uuid4().hex[:8]
    names = tuple(f"axis{index}_{tag}" for index in range(len(shape)))
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    return [mesh, *(mesh[name] for name in names)]


def shard_net(net: Net, layout: str, device: str, offload: bool = False) -> DeviceMesh:
    """Cut a net in place; return the mesh of the axis over which the data is cut."""
    policy = CPUOffloadPolicy(pin_memory=device != "cpu") if offload else OffloadPolicy()
    if layout == "fsdp":
        data, _ = build_mesh(device, dist.get_world_size())
    else:
        _, data, tensor = build_mesh(device, dist.get_world_size() // TP, TP)
        parallelize_module(net, tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for module in (net.up, net.down, net):
        fully_shard(module, mesh=data, offload_policy=policy)
    return data


def batches(count: int, device: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(8, 7, generator=generator).to(device, dtype) for _ in range(count)]


def backward(net: torch.nn.Module, batch: torch.Tensor) -> None:
    net.zero_grad()
    net(batch).square().mean().backward()


def slice_of(batch: torch.Tensor, data: DeviceMesh) -> torch.Tensor:
    return batch.chunk(data.size())[data.get_local_rank()]


def full(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu().clone()


def full_norm(params, norm_type: float = 2.0) -> float:
    whole = [full(p.grad).double().reshape(-1) for p in params if p.grad is not None]
    return torch.linalg.vector_norm(torch.cat(whole), ord=norm_type).item()


def norm_of_frozen_ranks(rank: int, world_size: int) -> tuple[float, ...]:
    """Return norms (2 and inf) where rank 1 has no gradient at all, ours and the expected ones.

    What rank 1 holds counts as zero.
    """
    _, axis = build_mesh("cpu", world_size)
    value = torch.arange(1.0, 9.0)
    trained = torch.nn.Parameter(distribute_tensor(value.clone(), axis, [Shard(0)]))
    frozen = torch.nn.Parameter(
        distribute_tensor(value.clone(), axis, [Shard(0)]), requires_grad=False
    )
    if rank == 0:
        trained.grad = distribute_tensor(value, axis, [Shard(0)], src_data_rank=None)
    params = [frozen, trained]
    norms = [gradient_norm(params, order).item() for order in (2.0, math.inf)]
    return norms[0], value[:4].norm().item(), norms[1], 4.0


def norm_of_mixed_placements(
    rank: int, world_size: int, device: str = "cpu", norm_type: float = 2.0
) -> tuple[float, ...]:
    """Return our norm, the full tensors' and, over a local copy, the clipped gradients' norm."""
    mesh, data, tensor = build_mesh(device, world_size // TP, TP)
    generator = torch.Generator().manual_seed(3)

    def make(shape, mesh, placements):
        value = torch.randn(shape, generator=generator).to(device)
        param = torch.nn.Parameter(distribute_tensor(value, mesh, placements))
        gradient = torch.randn(shape, generator=generator).to(device)
        param.grad = distribute_tensor(gradient, mesh, placements)
        return param

    params = [
        make((8, 6), mesh, [Shard(0), Shard(1)]),
        make((5, 3), mesh, [Shard(0), Shard(0)]),  # uneven
        make((1, 3), mesh, [Shard(0), Replicate()]),  # empty on the second half
        make((4, 4), mesh, [Replicate(), Replicate()]),
        make((6, 2), mesh, [Replicate(), Shard(1)]),
        make((9,), data, [Shard(0)]),  # a mesh of its own, one axis of the other
        make((3, 5), tensor, [Shard(1)]),
    ]
    plain = torch.nn.Parameter(torch.zeros(4, device=device))
    plain.grad = torch.randn(4, generator=generator).to(device)
    unused = torch.nn.Parameter(distribute_tensor(torch.zeros(4, 4, device=device), data))
    pending = make((4, 2), mesh, [Shard(0), Replicate()])
    whole = pending.grad.to_local()
    share = 0.25 if tensor.get_local_rank() == 0 else 0.75
    pending.grad = DTensor.from_local(whole * share, mesh, [Shard(0), Partial()])
    net = build_net(device)  # FSDP2 over TP: the strided placement
    shard_net(net, "fsdp_tp", device)
    backward(net, batches(1, device)[0][:4])
    params += [plain, unused, pending, *net.parameters()]
    expected = full_norm(params, norm_type)
    norm = gradient_norm(params, norm_type)
    assert norm.shape == () and norm.device.type == device
    returned = fsdp2_clip_grad_norm(params, 0.5 * expected, norm_type)
    return norm.item(), expected, returned.item(), full_norm(params, norm_type)


def names_of_placements(rank: int, world_size: int) -> list[str]:
    net = build_net("cpu")
    shard_net(net, "fsdp_tp", "cpu")
    return [type(placement).__name__ for p in net.parameters() for placement in p.placements]


def train_both(
    rank: int,
    world_size: int,
    kind: str,
    layout: str,
    device: str = "cpu",
    offload: bool = False,
) -> tuple[float, float]:
    """Train a sharded net and a whole one; return the largest differences of weights and norms."""
    net, whole = build_net(device), build_net(device)
    data = shard_net(net, layout, device, offload)
    config = OptimizerConfig(type=kind, lr=0.05, weight_decay=0.1)
    optimizer = build_optimizer(net.named_parameters(), config, "float32")
    if kind == "adam_bf16":
        reference = build_optimizer(whole.named_parameters(), config, "float32")
    elif kind == "sgd":
        reference = torch.optim.SGD(whole.parameters(), lr=0.05, weight_decay=0.1, foreach=False)
    else:
        reference = torch.optim.AdamW(whole.parameters(), lr=0.05, weight_decay=0.1, foreach=False)
    assert not offload or next(net.parameters()).device.type == "cpu"
    worst = 0.0
    for batch in batches(STEPS, device):
        backward(net, slice_of(batch, data))
        backward(whole, batch)
        verdict = plan_clipping(gradient_norm(net.parameters()), MAX_NORM)
        optimizer.step(clip=verdict)
        expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM, foreach=False)
        reference.step()
        worst = max(worst, abs(verdict.norm.item() / expected.item() - 1))
    pairs = zip(net.parameters(), whole.parameters(), strict=True)
    return max((full(a) - full(b)).abs().max().item() for a, b in pairs), worst


def raw_bits(optimizer: torch.optim.Optimizer) -> list[bytes]:
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    tensors += [v for p in list(tensors) for v in optimizer.state.get(p, {}).values()]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return [t.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for t in local]


def skip_a_step(
    rank: int, world_size: int, kind: str, poison: float, device: str = "cpu"
) -> tuple[bool, bool, float]:
    """Poison one element on one rank; return whether a step moved nothing, then and next."""
    net = build_net(device)
    data = shard_net(net, "fsdp", device)
    optimizer = build_optimizer(net.named_parameters(), OptimizerConfig(type=kind, lr=0.05))
    found = []
    for index, batch in enumerate(batches(4, device)):
        backward(net, slice_of(batch, data))
        if index == 2 and rank == world_size - 1:
            net.up.weight.grad.to_local().view(-1)[0] = poison
        before = raw_bits(optimizer)
        verdict = plan_clipping(gradient_norm(net.parameters()), MAX_NORM)
        optimizer.step(clip=verdict)
        if index > 1:
            found.append(raw_bits(optimizer) == before)
            if index == 2:
                skipped = verdict.found_inf.item()
    return found[0], found[1], skipped


def resume_from_checkpoint(
    rank: int, world_size: int, kind: str, dtype: str, folder: str, device: str = "cpu"
) -> dict[str, object]:
    """Train 2 steps, save, load into a fresh pair, train both on; report what was seen."""
    torch_dtype = getattr(torch, dtype)
    config = OptimizerConfig(type=kind, lr=0.05)
    data = batches(4, device, torch_dtype)

    def start():
        net = build_net(device, torch_dtype)
        mesh = shard_net(net, "fsdp", device)
        return net, mesh, build_optimizer(net.named_parameters(), config, dtype)

    def train(net, mesh, optimizer, steps):
        for batch in steps:
            backward(net, slice_of(batch, mesh))
            optimizer.step()
        net.zero_grad()

    net, mesh, optimizer = start()
    train(net, mesh, optimizer, data[:2])
    saved = get_optimizer_state_dict(net, optimizer)
    dcp.save({"model": net.state_dict(), "optimizer": saved}, checkpoint_id=f"{folder}/sharded")
    whole = get_optimizer_state_dict(
        net, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    fresh, fresh_mesh, fresh_optimizer = start()
    target = {
        "model": fresh.state_dict(),
        "optimizer": get_optimizer_state_dict(fresh, fresh_optimizer),
    }
    dcp.load(target, checkpoint_id=f"{folder}/sharded")
    set_optimizer_state_dict(fresh, fresh_optimizer, target["optimizer"])
    fresh.load_state_dict(target["model"])
    same_states = raw_bits(fresh_optimizer) == raw_bits(optimizer)
    train(net, mesh, optimizer, data[2:])
    train(fresh, fresh_mesh, fresh_optimizer, data[2:])
    states = {
        f"{name}.{key}": (str(value.dtype), isinstance(value, DTensor))
        for name, state in saved["state"].items()
        for key, value in state.items()
    }
    return {
        "states": states,
        "names": sorted(name for name, _ in net.named_parameters()),
        "whole_shapes": {
            name: tuple(state["exp_avg"].shape) for name, state in whole.get("state", {}).items()
        },
        "same_states": same_states,
        "same_end": raw_bits(fresh_optimizer) == raw_bits(optimizer),
    }
