"""What our optimizers share: a step over local shards whose clipping and skipping happen on the device.

States are tensors laid out like the parameter (a DTensor for a DTensor), so distributed checkpoints
see them; the update itself runs torch's multi-tensor kernels over local shards, device by device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from fsdpbench.engine.optim.clip import ClipVerdict
from fsdpbench.engine.optim.shards import by_device, local_tensor, reduce_pending_gradients

STEP = "step"  # float32, 0-D, on the shard's device; counts the steps that were not skipped


class ShardedOptimizer(Optimizer):
    """Base of the optimizers; a subclass names its states and updates one device's shards."""

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, clip: ClipVerdict | None = None
    ) -> float | None:
        """Update the parameters; with a verdict, scaled by it, or not at all.

        A skipped step leaves parameters, states and step counters bitwise as they were. Gradients
        are used up: their values afterwards are not defined.
        Collective over: the axes of pending gradients (none under FSDP2).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            reduce_pending_gradients(group["params"])
            for device, params in by_device(group["params"]).items():
                verdict = None if clip is None else clip.on(device)
                for param in params:
                    if not self.state[param]:
                        self.state[param] = self.initial_state(param)
                self.update_shards(group, params, verdict)
        return loss

    def state_dtypes(self, param: torch.Tensor) -> dict[str, torch.dtype]:
        """Name the parameter's states besides the step counter and the dtype each is kept in."""
        raise NotImplementedError

    def update_shards(
        self, group: dict[str, Any], params: list[torch.nn.Parameter], clip: ClipVerdict | None
    ) -> None:
        """Update parameters whose shards, gradients, states and verdict lie on one device."""
        raise NotImplementedError

    def initial_state(self, param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Build zero states laid out as the parameter; empty for an optimizer without states."""
        dtypes = self.state_dtypes(param)
        if not dtypes:
            return {}
        step = torch.zeros((), dtype=torch.float32, device=local_tensor(param).device)
        zeros = {name: torch.zeros_like(param, dtype=dtype) for name, dtype in dtypes.items()}
        return {STEP: step} | zeros

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load as torch does, then put each state into its own dtype and onto the shard's device.

        torch casts floating states to the parameter's dtype, which would round a wider state, and
        leaves the step counter where the file had it.
        """
        super().load_state_dict(dict(state_dict))
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


def divisor(clip: ClipVerdict | None) -> torch.Tensor | None:
    """Return what torch's fused kernels divide gradients by; None leaves them unscaled."""
    return None if clip is None or clip.scale is None else clip.scale.reciprocal()
