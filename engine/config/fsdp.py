"""Settings of FSDP2 itself: what is wrapped, what lies on the CPU, how weights arrive."""

from __future__ import annotations

from fsdpbench.engine.config.strict import Flag, Integer, NonNegativeInt, StrictModel, rule
from fsdpbench.errors import Violation


class FSDPWrapPolicy(StrictModel):
    """Which modules become FSDP units besides the root."""

    transformer_layer_cls_to_wrap: tuple[str, ...] | None = None
    """Class names to wrap; None wraps the decoder layers of the model family."""

    @rule("transformer_layer_cls_to_wrap")
    def _names_something(self) -> Violation | None:
        if self.transformer_layer_cls_to_wrap != ():
            return None
        return Violation(
            "transformer_layer_cls_to_wrap",
            "[]",
            "must name at least one class",
            "leave it out to wrap the decoder layers",
        )


class FSDPEngineConfig(StrictModel):
    """The `fsdp` section of a training configuration."""

    wrap_policy: FSDPWrapPolicy | None = None
    """Modules to wrap; None wraps the decoder layers that transformers defines."""
    offload_params: Flag = False
    """Keep parameters, gradients and optimizer states in host memory between uses."""
    memory_efficient_load: Flag = False
    """Read the weights on rank 0 alone and broadcast them into the shards."""
    per_layer_optim_step: Flag = False
    """Stream the Adam step layer by layer, states in host memory; needs optimizer.type adam."""
    optim_step_prefetch_layers: Integer = 1
    """Layers fetched ahead by the per-layer step; 0 fetches none."""
    reshard_after_forward: Flag = True
    """Free a layer's gathered parameters after its forward pass; false keeps them for backward."""
    forward_prefetch_layers: NonNegativeInt = 0
    """Layers gathered ahead in the forward pass; 0 gathers the next when the host reaches it."""
    backward_prefetch_layers: NonNegativeInt = 0
    """Layers gathered ahead in the backward pass; 0 leaves it to FSDP2, which gathers one."""
    shard_vision_across_sp: Flag = False
    """Cut the vision encoder's images over the context-parallel ranks."""

    @rule("optim_step_prefetch_layers")
    def _prefetch_is_not_negative(self) -> Violation | None:
        if self.optim_step_prefetch_layers >= 0:
            return None
        return Violation(
            "optim_step_prefetch_layers",
            str(self.optim_step_prefetch_layers),
            "must be 0 or more",
            "0 fetches no layer ahead, 1 overlaps one transfer with the computation",
        )
