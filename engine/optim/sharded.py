"""What our optimizers share: a step over local shards, clipped and skipped on the device.

States are tensors laid out like the parameter (a DTensor for a DTensor), so distributed checkpoints
see them; the update itself runs torch's multi-tensor kernels over local shards, device by device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from fsdpbench.engine.optim.clip import ClipVerdict
from fsdpbench.engine.optim.shards import (
    by_device,
    local_tensor,
    reduce_pending_gradients,
)

STEP = "step"  # float32, 0-D, on the shard's device; counts the steps that were not skipped


@dataclass(frozen=True)
class StepGuard:
    """How one device's shards are to be updated: 0-D float32 tensors on that device, or None."""

    grad_scale: torch.Tensor | None  # gradients are divided by it
    found_inf: torch.Tensor | None  # 1.0: change nothing


def build_guard(clip: ClipVerdict | None, device: torch.device) -> StepGuard:
    """Bring a verdict to a device; waits when it goes to the CPU, whose kernel reads it at once."""
    if clip is None:
        return StepGuard(None, None)
    scale = clip.grad_scale
    return StepGuard(None if scale is None else scale.to(device), clip.found_inf.to(device))


class ShardedOptimizer(Optimizer):
    """Base of the optimizers; a subclass names its states and updates one device's shards."""

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        clip: ClipVerdict | None = None,
    ) -> float | None:
        """Update the parameters; with a verdict, by scaled gradients or not at all.

        The verdict lies on the shards' device, so the host does not read it. A skipped step leaves
        parameters, states and step counters bitwise as they were. Gradients are used up: their
        values afterwards are not defined.
        Collective over: the axes of pending gradients (none under FSDP2).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.apply_update(clip)
        return loss

    def apply_update(self, clip: ClipVerdict | None) -> None:
        """Update all parameters that have a gradient, device by device. Under no_grad."""
        for group in self.param_groups:
            reduce_pending_gradients(group["params"])
            for device, params in by_device(group["params"]).items():
                guard = build_guard(clip, device)
                for param in params:
                    if param not in self.state and self.state_dtypes(param):
                        self.state[param] = self.initial_state(param)
                self.update_shards(group, params, guard)

    def close(self) -> None:
        """Give back what lies outside of torch's allocators; no step may follow."""

    def state_dtypes(self, param: torch.Tensor) -> dict[str, torch.dtype]:
        """Name the parameter's states besides the step counter and the dtype each is kept in."""
        raise NotImplementedError

    def update_shards(
        self, group: dict[str, Any], params: list[torch.nn.Parameter], guard: StepGuard
    ) -> None:
        """Update parameters whose shards, gradients, states and guard lie on one device."""
        raise NotImplementedError

    def initial_state(self, param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Build zero states laid out as the parameter."""
        dtypes = self.state_dtypes(param)
        step = torch.zeros((), dtype=torch.float32, device=local_tensor(param).device)
        zeros = {name: torch.zeros_like(param, dtype=dtype) for name, dtype in dtypes.items()}
        return {STEP: step} | zeros

    @torch.no_grad()
    def make_states(self) -> None:
        """Make the states of all parameters now, as zeros, where they do not exist yet.

        Without gradients and without a step: what a checkpoint is to be loaded into.
        """
        for group in self.param_groups:
            for param in group["params"]:
                if param not in self.state and self.state_dtypes(param):
                    self.state[param] = self.initial_state(param)

    def forget_rounding(self) -> None:
        """Drop what states keep about the rounding of parameters whose values were replaced."""

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, then put each state into its own dtype and onto the shard's device.

        torch casts floating states to the parameter's dtype, which would round a wider state, and
        leaves the step counter where the file had it.
        """
        super().load_state_dict(state_dict)
        saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for saved_id, param in zip(saved_ids, params, strict=True):
            saved = state_dict["state"].get(saved_id)
            if not saved:
                continue
            device = local_tensor(param).device
            dtypes = {STEP: torch.float32} | self.state_dtypes(param)
            for name, dtype in dtypes.items():
                value = torch.as_tensor(saved[name]).detach()
                self.state[param][name] = value.to(device=device, dtype=dtype, copy=True)

    def local_states(self, params: list[torch.nn.Parameter], name: str) -> list[torch.Tensor]:
        """Return the local shards of one state of all these parameters."""
        return [local_tensor(self.state[param][name]) for param in params]
