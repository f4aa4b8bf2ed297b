"""AdamW whose moments live in page-locked host memory and visit the device block by block.

Schedule: see "Note: three lanes" in `stream_step`. The update is the fused kernel of `AdamW` over
the same elements, so results are those of `AdamW`. Weights and gradients that rest in host memory
(offload_params) travel with the moments; those on the device are updated where they lie.
Technique: states in host memory as in ZeRO-Offload (arXiv:2101.06840), arithmetic on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from fsdpbench.engine.device import Device
from fsdpbench.engine.host_memory import HostRegions
from fsdpbench.engine.optim.adamw import AdamW
from fsdpbench.engine.optim.clip import ClipVerdict
from fsdpbench.engine.optim.host_states import allocate_host_states, lay_out_as
from fsdpbench.engine.optim.sharded import STEP, build_guard
from fsdpbench.engine.optim.shards import local_tensor, reduce_pending_gradients
from fsdpbench.engine.optim.stream_plan import plan_blocks
from fsdpbench.engine.optim.stream_step import stream_blocks
from fsdpbench.engine.optim.stream_update import BlockStager, StreamedUpdate
from fsdpbench.errors import CheckpointError, ConfigError, Violation

REMEDY = "use one parameter group, or set fsdp.per_layer_optim_step to false"


class StreamedAdamW(AdamW):
    """The per-layer optimizer step: `AdamW` with its states in host memory.

    `blocks` lists the parameters of each FSDP unit. A step needs (prefetch_layers + 2) blocks of
    device memory, less where the weights lie on the device, and gives it back. It returns when the
    states rest on the host again. Parameters are planned once: groups cannot be added later.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        device: Device,
        blocks: Sequence[Collection[torch.nn.Parameter]] = (),
        prefetch_layers: int = 1,
        stage_weights: bool | None = None,  # None: those that do not lie on the device
    ) -> None:
        self.streamed: list[torch.nn.Parameter] = []  # filled once the groups are complete
        super().__init__(params, lr, betas, eps, weight_decay)  # type: ignore[arg-type]
        self.check_equal_groups()
        self.device, self.prefetch_layers = device, prefetch_layers
        self.stage_weights = stage_weights
        self.streamed = list(chain.from_iterable(group["params"] for group in self.param_groups))
        self._index = {param: index for index, param in enumerate(self.streamed)}
        with torch.no_grad():
            lengths = [local_tensor(param).numel() for param in self.streamed]
        units = [[self._index[p] for p in block if p in self._index] for block in blocks]
        self.blocks = plan_blocks(lengths, units)
        self._regions = HostRegions(device)
        dtypes = [self.state_dtypes(param) for param in self.streamed]
        self._host = allocate_host_states(self._regions, self.blocks, lengths, dtypes)
        self._steps = torch.zeros(len(lengths), dtype=torch.float32)
        num_pieces = sum(map(len, self.blocks))
        self._returned_steps = self._regions.allocate((num_pieces,), torch.float32)
        self._written: set[torch.nn.Parameter] = set()  # whose host memory is no longer zero

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is built; refuse it later."""
        if self.streamed:
            allowed = "the per-layer step plans its memory for the parameters it is built with"
            raise ConfigError([Violation("add_param_group", "", allowed, REMEDY)])
        super().add_param_group(param_group)

    def check_equal_groups(self) -> None:
        """Refuse parameter groups of different hyper-parameters, naming them."""
        first, *others = self.param_groups
        names = [name for name in first if name not in ("params", "param_names")]
        found = {name: [group.get(name) for group in (first, *others)] for name in names}
        violations = [
            Violation(
                f"param_groups.{name}",
                ", ".join(map(str, values)),
                "must be equal in all groups under the per-layer optimizer step",
                REMEDY,
            )
            for name, values in found.items()
            if any(value != values[0] for value in values)
        ]
        if violations:
            raise ConfigError(violations)

    def close(self) -> None:
        """Unlock the host memory; states remain readable. No step may follow."""
        self._regions.close()

    # ---- step ---------------------------------------------------------------------------------

    def apply_update(self, clip: ClipVerdict | None) -> None:
        """Stream the blocks that have gradients through the device. Under no_grad."""
        self.check_equal_groups()
        reduce_pending_gradients(self.streamed)
        active = [
            [piece for piece in block if self.streamed[piece.index].grad is not None]
            for block in self.blocks
        ]
        blocks = [pieces for pieces in active if pieces]
        if not blocks:
            return
        indices = [piece.index for block in blocks for piece in block]
        for index in dict.fromkeys(indices):
            param = self.streamed[index]
            if param not in self.state:
                self.state[param] = self.initial_state(param)
        self._regions.wait()
        returned = self._returned_steps[: len(indices)]
        work = StreamedUpdate(
            self.device,
            blocks,
            BlockStager(self.streamed, self._host, self._travels),
            self.prefetch_layers,
            self.param_groups[0],
            build_guard(clip, self.device.torch_device),
            self.device.to_device(self._steps[indices]),
            returned,
        )
        lanes = {"fetch": work.fetch, "update": work.update, "store": work.store}
        stream_blocks(self.device, len(blocks), self.prefetch_layers, **lanes)
        self._steps[indices] = returned

    def _travels(self, tensor: torch.Tensor) -> bool:
        if self.stage_weights is not None:
            return self.stage_weights
        return tensor.device.type != self.device.type

    # ---- states -------------------------------------------------------------------------------

    def initial_state(self, param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Show the parameter's zeroed host memory as its states."""
        index = self._index[param]
        host = self._host[index]
        if param in self._written:
            self._steps[index] = 0
            for name in host.starts:
                host.flat(name).zero_()
        self._written.add(param)
        moments = {name: lay_out_as(param, host.flat(name)) for name in host.starts}
        return {STEP: self._steps[index], **moments}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy states into this optimizer's host memory; the device sees none of them."""
        # without states: torch would move each to where the parameter lies
        Optimizer.load_state_dict(self, {**state_dict, "state": {}})
        saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for saved_id, param in zip(saved_ids, self.streamed, strict=True):
            saved = state_dict["state"].get(saved_id)
            if not saved:
                continue
            values = {name: local_tensor(torch.as_tensor(value)) for name, value in saved.items()}
            self._load_state(param, values)

    def _load_state(self, param: torch.nn.Parameter, values: dict[str, torch.Tensor]) -> None:
        host = self._host[self._index[param]]
        self._written.discard(param)  # all of it is overwritten, perhaps by itself
        self.state[param] = self.initial_state(param)
        for name in (STEP, *host.starts):
            target = local_tensor(self.state[param][name])
            if name not in values or values[name].shape != target.shape:
                found = tuple(values[name].shape) if name in values else "missing"
                raise CheckpointError(
                    f"optimizer state {name} of parameter {self._index[param]}: found {found}, "
                    f"the shard is {tuple(target.shape)}. Load with the parallel layout it was "
                    "saved with, or through a distributed checkpoint."
                )
            target.copy_(values[name])


PerLayerOptimWrapper = StreamedAdamW  # the name that other engines give it
