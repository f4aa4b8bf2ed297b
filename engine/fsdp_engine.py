"""The engine that users hold: a facade over build phases, one step and the parallel meshes.

Nothing but delegation lives here. Every method that touches the model is collective over the
engine's world unless it says otherwise; ranks of one data-parallel index must pass the same batch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch

from fsdpbench.engine import step
from fsdpbench.engine.batching.microbatch import (
    compute_total_loss_weight,
    reorder_and_pad_outputs,
)
from fsdpbench.engine.checkpoint.background import AsyncSaves
from fsdpbench.engine.checkpoint.formats import load_checkpoint
from fsdpbench.engine.config.checkpoint import SaveLoadMeta
from fsdpbench.engine.config.train import FinetuneSpec, TrainEngineConfig
from fsdpbench.engine.models.facts import ModelFacts
from fsdpbench.engine.protocols import InferenceEngine, LossFn, LossInputs, LossWeightFn
from fsdpbench.engine.ranked_engine import RankedEngine
from fsdpbench.engine.setup import EngineParts, build_parts
from fsdpbench.engine.weight_sync.groups import LOOPBACK
from fsdpbench.engine.weight_updates import build_updater, walk_weights
from fsdpbench.errors import ConfigError, FsdpbenchError, Violation

if TYPE_CHECKING:
    from fsdpbench.engine.config.weight_sync import WeightUpdateMeta
    from fsdpbench.engine.weight_sync.timings import UpdateTimings
    from fsdpbench.engine.weight_sync.update import WeightUpdater

Batch = Mapping[str, torch.Tensor]


class FSDPEngine(RankedEngine):
    """Trains and evaluates a dense causal language model under FSDP2 with TP, DP and CP.

    Built from a configuration; complete after `initialize`. Source of the method: PyTorch FSDP2
    (`torch.distributed.fsdp.fully_shard`), Ulysses context parallelism (arXiv:2309.14509),
    tensor and sequence parallelism (arXiv:2205.05198).
    """

    def __init__(self, config: TrainEngineConfig) -> None:
        super().__init__(config)
        self._parts: EngineParts | None = None
        self._version = 0
        self._saves = AsyncSaves()
        self._updater: WeightUpdater | None = None
        self._last_stats: dict[str, float] = {}

    # ---- life ---------------------------------------------------------------------------------

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Build, shard and load the model and its optimizer. Collective over: the world.

        `addr` must be None: the engine runs in the calling process. `ft_spec` sizes the schedule.
        """
        violations = []
        if addr is not None:
            violations.append(
                Violation("addr", repr(addr), "must be None", "call initialize in each worker")
            )
        if ft_spec is None:
            violations.append(
                Violation("ft_spec", "None", "a FinetuneSpec is required", "pass ft_spec=")
            )
        if violations or ft_spec is None:
            raise ConfigError(violations)
        if self._parts is not None:
            raise FsdpbenchError("initialize: this engine is initialized; call destroy() first")
        self.create_process_group()
        device, meshes = self.device, self.meshes
        with self.tracer.span("init", "other"):
            self._parts = build_parts(self.config, ft_spec, device, meshes, self.tracer)

    @property
    def initialized(self) -> bool:
        """True between `initialize` and `destroy`."""
        return self._parts is not None

    @property
    def parts(self) -> EngineParts:
        """The engine's built parts; raises FsdpbenchError before `initialize`."""
        if self._parts is None:
            raise FsdpbenchError("the engine has no model yet: call initialize(ft_spec=...) first")
        return self._parts

    def destroy(self) -> None:
        """Free model, optimizer and the groups that this engine made; safe to call twice."""
        parts, self._parts = self._parts, None
        with ExitStack() as stack:
            stack.callback(self.leave_groups)
            stack.callback(gc.collect)  # FSDP2's hooks tie modules and states into cycles
            if parts is not None:
                stack.callback(parts.close)
            del parts
            stack.callback(self._saves.close)
            stack.callback(self.disconnect_engine)

    # ---- memory -------------------------------------------------------------------------------

    def offload(self) -> None:
        """Move weights, gradients and optimizer states to host memory; nothing if they are there.

        The device memory is given back to the driver. Until `onload`, whatever computes, saves or
        loads raises FsdpbenchError. If one rank lacks the memory, all stay as they were and raise.
        Collective over: the world (CPU).
        """
        with self.tracer.span("offload", "io"):
            self.parts.memory.offload()

    def onload(self) -> None:
        """Bring everything back to the device; nothing if it is there.

        If one rank lacks the memory, all stay offloaded and raise.
        Collective over: the world (CPU).
        """
        with self.tracer.span("onload", "io"):
            self.parts.memory.onload()

    @contextmanager
    def offloaded(self) -> Iterator[None]:
        """Keep the engine offloaded in the `with` body, then as it was before. Re-entrant.

        Collective over: the world (CPU), except after an error in the body.
        """
        with self.parts.memory.offloaded():
            yield

    @contextmanager
    def onloaded(self) -> Iterator[None]:
        """Keep the engine on the device in the `with` body, then as it was before. Re-entrant.

        Collective over: the world (CPU), except after an error in the body.
        """
        with self.parts.memory.onloaded():
            yield

    @property
    def is_offloaded(self) -> bool:
        """Whether the engine's memory is on the host. Local."""
        return self.parts.memory.is_offloaded

    # ---- training -----------------------------------------------------------------------------

    def train_batch(
        self,
        input_: Batch,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        *,
        with_entropy: bool = False,
    ) -> dict[str, float]:
        """Run one optimizer step over the batch and return its figures.

        Keys: loss (over the global weight), grad_norm (before clipping), update_successful (0.0
        when a non-finite norm skipped the step), lr, num_micro_batches, and the loss function's
        stats.
        """
        self.check_trains()
        self.optimizer_zero_grad()
        names, values, count = self._run(
            input_, loss_fn, loss_weight_fn, with_entropy=with_entropy, forward_only=False
        )
        verdict = step.apply_optimizer_step(self.parts)
        self.optimizer_zero_grad()  # used up; whatever comes before the next step has their memory
        read = step.read_stats(
            [*names, "grad_norm", "skipped"], torch.cat([values, verdict.to(values.device)])
        )
        return self._remember(read, count)

    def eval_batch(
        self,
        input_: Batch,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        *,
        with_entropy: bool = False,
    ) -> dict[str, float]:
        """Return loss and stats of the batch over the global weight, without gradients."""
        names, values, _ = self._run(
            input_, loss_fn, loss_weight_fn, with_entropy=with_entropy, forward_only=True
        )
        return step.read_stats(names, values)

    def forward_backward_batch(
        self,
        input_: Batch,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        *,
        with_entropy: bool = False,
        forward_only: bool = False,
    ) -> dict[str, float]:
        """Accumulate the batch's gradients (unless `forward_only`) without stepping."""
        names, values, _ = self._run(
            input_, loss_fn, loss_weight_fn, with_entropy=with_entropy, forward_only=forward_only
        )
        return step.read_stats(names, values)

    def forward_batch(
        self,
        input_: Batch,
        output_seqlens: list[int] | None = None,
        aggregate_fn: Callable[[list[torch.Tensor]], torch.Tensor] = torch.cat,
        *,
        select: Callable[[LossInputs], torch.Tensor] = lambda inputs: inputs.logprobs,
        with_entropy: bool = False,
    ) -> torch.Tensor:
        """Return token values (log-probabilities by default) per row of the batch, no gradients.

        [B, L], 0 behind each row's end. `output_seqlens` are the values per row (default: one a
        token); `aggregate_fn` joins the micro-batches' packed outputs.
        """
        self.parts.memory.check_onloaded("forward_batch")
        planned = step.plan_microbatches_over_ranks(self.parts, input_)
        outputs = step.run_forward_only(self.parts, planned, select, with_entropy=with_entropy)
        return reorder_and_pad_outputs(outputs, planned, output_seqlens, aggregate_fn)

    def _run(
        self,
        batch: Batch,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        *,
        with_entropy: bool,
        forward_only: bool,
    ) -> tuple[list[str], torch.Tensor, int]:
        parts = self.parts
        parts.memory.check_onloaded("a forward pass")
        planned = step.plan_microbatches_over_ranks(parts, batch)
        weight = compute_total_loss_weight(planned, loss_weight_fn, parts.meshes.dp_cpu_group)
        outputs = step.run_microbatches(
            parts,
            planned,
            loss_fn,
            weight,
            with_entropy=with_entropy,
            forward_only=forward_only,
        )
        names, values = step.reduce_losses(parts, outputs, weight)
        return names, values, len(planned)

    def optimizer_zero_grad(self) -> None:
        """Drop all gradients. Local."""
        for parameter in self.parts.model.parameters():
            parameter.grad = None

    def optimizer_step(self) -> dict[str, float]:
        """Clip the accumulated gradients and step; return the step's figures."""
        self.check_trains()
        verdict = step.apply_optimizer_step(self.parts)
        return self._remember(step.read_stats(["grad_norm", "skipped"], verdict), 0)

    def lr_scheduler_step(self) -> None:
        """Advance the learning-rate schedule by one step. Local."""
        self.check_trains()
        if self.parts.scheduler is not None:
            self.parts.scheduler.step()

    def check_trains(self) -> None:
        """Raise ConfigError when the engine was built for inference only, and when offloaded."""
        self.parts.memory.check_onloaded("training")
        if self.parts.optimizer is None:
            violation = Violation(
                "optimizer",
                "None",
                "this engine was built for inference only",
                "set optimizer to train",
            )
            raise ConfigError([violation])

    def train(self, mode: bool = True) -> Self:
        """Switch to training mode (dropout as configured). Local."""
        self.parts.model.train(mode)
        return self

    def eval(self) -> Self:
        """Switch to evaluation mode. Local."""
        return self.train(False)

    def _remember(self, read: dict[str, float], num_microbatches: int) -> dict[str, float]:
        optimizer = self.parts.optimizer
        assert optimizer is not None
        read["update_successful"] = 1.0 - read.pop("skipped")
        read["lr"] = float(optimizer.param_groups[0]["lr"])
        read["num_micro_batches"] = float(num_microbatches)
        self._last_stats = read
        return read

    # ---- checkpoints --------------------------------------------------------------------------

    def save(self, meta: SaveLoadMeta) -> None:
        """Write weights or the whole training state at `meta.path`. Collective over: the world.

        With `meta.asynchronous` files are written while training goes on; the next `save` or
        `wait_for_save` raises what went wrong.
        """
        self.parts.memory.check_onloaded("save")
        with self.tracer.span("save", "io"):
            self._saves.save(self.parts, meta, self._version)

    def wait_for_save(self) -> None:
        """Return when the last save is on the disk. Collective over: the world."""
        self._saves.wait()

    def load(self, meta: SaveLoadMeta) -> None:
        """Read what `save` wrote, or a foreign HF folder, in place. Collective over: the world."""
        self.parts.memory.check_onloaded("load")
        with self.tracer.span("load", "io"):
            self._saves.wait()  # it may be about to replace what is read
            version = load_checkpoint(self.parts, meta)
        if version is not None:
            self._version = version

    # ---- weights for rollout ------------------------------------------------------------------

    def connect_engine(
        self,
        engine: InferenceEngine | Sequence[InferenceEngine] | None,
        meta: WeightUpdateMeta,
        *,
        host: str = LOOPBACK,
    ) -> None:
        """Connect to rollout engines, which rank 0 alone holds. Collective over: the world.

        `host` is the address at which receivers on other machines reach rank 0. Raises
        WeightSyncError (PeerError on other ranks) when an engine cannot take what `meta` sends.
        """
        self.disconnect_engine()
        engines = () if engine is None else engine
        held = tuple(engines) if isinstance(engines, Sequence) else (engines,)
        updater = build_updater(self.parts, held, meta, host=host)
        updater.connect()
        self._updater = updater

    def update_weights(
        self, meta: WeightUpdateMeta | None = None, *, version: int | None = None
    ) -> UpdateTimings:
        """Bring the weights, as `version` (None: `get_version()`), into all connected engines.

        When this returns they generate with it. A `meta` other than that of `connect_engine`
        connects anew. The timings are the same on all ranks. Collective over: the world.
        """
        if self._updater is None:
            raise FsdpbenchError("update_weights: call connect_engine(engine, meta) first")
        if meta is not None and meta != self._updater.meta:
            receivers, host = self._updater.receivers.engines, self._updater.host
            self.connect_engine(receivers, meta, host=host)
        parts, updater = self.parts, self._updater
        parts.memory.check_onloaded("update_weights")
        if version is not None:
            self.set_version(version)
        with self.tracer.span("update_weights", "comm"):
            return updater.update(self._version, walk_weights(parts, updater.meta))

    def disconnect_engine(self) -> None:
        """Leave the rollout engines as they are; safe without any. Local."""
        updater, self._updater = self._updater, None
        if updater is not None:
            updater.close()

    # ---- observation --------------------------------------------------------------------------

    def export_stats(self) -> dict[str, Any]:
        """Return the last step's figures and this rank's memory. Local."""
        memory = {f"memory/{k}": v for k, v in vars(self.get_device_stats()).items()}
        return {**self._last_stats, **memory}

    @property
    def attention_kernel_name(self) -> str:
        """The attention kernel that `attn_impl` was resolved to on this machine."""
        return self.parts.model.attention_kernel.name

    @property
    def model_facts(self) -> ModelFacts:
        """Sizes of the model that was built."""
        return self.parts.model.facts

    def set_version(self, version: int) -> None:
        """Record the version of the weights. Local."""
        self._version = version

    def get_version(self) -> int:
        """Return the recorded version of the weights. Local."""
        return self._version
