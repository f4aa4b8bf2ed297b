"""One rank of a trial: `torchrun ... -m fsdpbench.bench.worker TRIAL_DIR`.

Reads `trial.json`, trains, and leaves heartbeats, steps, samples, traces and, by rank 0, the
outcome; a failing rank leaves its last words (`rank_error`). It measures what the engine does and
changes nothing about it; only Python's collector is spared what the process keeps to its end.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdpbench.bench.documents import load_workload
from fsdpbench.bench.faults import FaultContext, parse_fault, strike_fault
from fsdpbench.bench.flops import count_step_flops
from fsdpbench.bench.folders import TrialFolder
from fsdpbench.bench.measurement import Measurement, Peaks, build_outcome
from fsdpbench.bench.rank_error import RankErrors, save_first_outcome
from fsdpbench.bench.recorders.allocator import AllocatorRecorder
from fsdpbench.bench.recorders.host import HostRecorder
from fsdpbench.bench.recorders.nvml import NvmlRecorder
from fsdpbench.bench.recorders.sampler import Recorder, sample_in_background
from fsdpbench.bench.records import TrialSpec
from fsdpbench.bench.sync_record import SyncRecord
from fsdpbench.bench.sync_rounds import run_sync
from fsdpbench.bench.timing import (
    STEP_SPAN,
    StepLog,
    StepRecord,
    set_aside_objects,
    summarise_phases,
    time_step,
)
from fsdpbench.bench.tokens import choose_encoder
from fsdpbench.bench.workloads import StepBatch, iterate_batches
from fsdpbench.engine.algorithms.sft import FSDPLMEngine
from fsdpbench.engine.config.tracing import PerfTracerConfig
from fsdpbench.engine.config.train import FinetuneSpec, TrainEngineConfig
from fsdpbench.engine.device import Device, DeviceMemory
from fsdpbench.engine.models.adapter_targets import count_adapter_weights
from fsdpbench.engine.models.facts import read_model_config
from fsdpbench.engine.models.load import load_tokenizer, resolve_path
from fsdpbench.engine.tracing.export import merge_chrome_trace
from fsdpbench.errors import ConfigError, Violation
from fsdpbench.log import configure_logging
from fsdpbench.ranks import Ranks, read_ranks

MAX_SPANS = 20_000  # per rank: a few megabytes of trace


@dataclass
class Trial:
    """What a rank carries through its trial."""

    spec: TrialSpec
    folder: TrialFolder
    ranks: Ranks
    errors: RankErrors
    engine: FSDPLMEngine
    host: HostRecorder = field(default_factory=HostRecorder)
    nvml: NvmlRecorder | None = None
    steps: list[StepRecord] = field(default_factory=list)
    step_flops: list[float] = field(default_factory=list)
    sync: SyncRecord | None = None

    def measure_peaks(self) -> Peaks:
        """Return this rank's highest memory use so far."""
        memory = read_device_memory(self.engine)
        return Peaks(
            peak_device_bytes=None if memory is None else memory.peak_allocated_bytes,
            peak_reserved_bytes=None if memory is None else memory.peak_reserved_bytes,
            device_total_bytes=self.nvml.measure_peak() if self.nvml else None,
            peak_host_bytes=self.host.measure_peak(),
        )

    def describe(self, peaks: Sequence[Peaks], phases: Mapping[str, float]) -> Measurement:
        """Return what is known now; `peaks` are those of the ranks that could be asked."""
        return Measurement(
            steps=self.steps,
            step_flops=self.step_flops,
            peaks=peaks,
            phases=phases,
            environment=describe_torch(self.spec.device, self.nvml),
            attention_kernel=self.engine.attention_kernel_name if self.engine.initialized else None,
            gpu_name=torch.cuda.get_device_name() if self.spec.device == "cuda" else None,
            dtype=self.spec.config.get("dtype", "bfloat16"),
            world_size=self.ranks.world_size,
            sync=self.sync,
        )


def run_trial(spec: TrialSpec, folder: TrialFolder, ranks: Ranks, errors: RankErrors) -> None:
    """Run this rank's part of the trial. Collective over: the world."""
    check_launch(spec, ranks)
    engine = FSDPLMEngine(TrainEngineConfig(**spec.config))
    traces = PerfTracerConfig(
        enabled=True, output_dir=str(folder.path / "traces"), max_events=MAX_SPANS
    )
    engine.config_perf_tracer(traces)
    trial = Trial(spec, folder, ranks, errors, engine)
    errors.enter("process_group")
    engine.create_process_group()
    device = Device(spec.device, ranks.local_rank if spec.device == "cuda" else None)
    trial.nvml = NvmlRecorder(find_gpu_uuid(device))
    errors.measure_memory = lambda: measure_memory(trial)
    errors.describe = lambda: trial.describe([trial.measure_peaks()], {})
    recorders: list[Recorder] = [trial.host, trial.nvml, AllocatorRecorder(device)]
    errors.enter("model_files")
    resolve_path(engine.config)  # may convert or write a model once: no part of the trial's peak
    trial.host.reset_peak()
    with sample_in_background(recorders, folder.samples_path, ranks.rank):
        errors.enter("data")
        documents = load_workload(spec.workload, engine.data_parallel_world_size)
        errors.enter("initialize")
        size = max(1, spec.workload.num_steps)
        engine.initialize(
            ft_spec=FinetuneSpec(total_train_epochs=1, dataset_size=size, train_batch_size=1)
        )
        trial.host.measure_unique()
        set_aside_objects()  # here the long collection delays no other rank's step
        if spec.workload.num_steps:
            errors.enter("batches")
            train(trial, device, plan_batches(trial, documents))
            trial.host.measure_unique()
        if spec.workload.syncs:
            trial.sync = run_sync(engine, spec, folder, errors.enter)
        errors.enter("outcome")
        finish(trial)
    errors.enter("destroy")
    gc.unfreeze()  # the engine is in cycles, which destroy collects
    engine.destroy()
    errors.enter("done")


def check_launch(spec: TrialSpec, ranks: Ranks) -> None:
    """Raise ConfigError when the processes or devices are not those that the trial is for."""
    violations = []
    if spec.world_size != ranks.world_size:
        allowed = f"was launched on {ranks.world_size} process(es)"
        remedy = f"use torchrun --nproc-per-node={spec.world_size}"
        violations.append(Violation("world_size", str(spec.world_size), allowed, remedy))
    found = torch.cuda.device_count()
    if spec.device == "cuda" and found < ranks.local_world_size:
        allowed = (
            f"torch {torch.__version__} sees {found} GPU(s) for {ranks.local_world_size} rank(s)"
        )
        violations.append(Violation("device", "cuda", allowed, "use fewer ranks or device=cpu"))
    if spec.device == "cpu" and found:
        allowed = f"torch sees {found} GPU(s) and would train on them"
        violations.append(Violation("device", "cpu", allowed, "set CUDA_VISIBLE_DEVICES="))
    if violations:
        raise ConfigError(violations)


def plan_batches(trial: Trial, documents: Sequence[Any]) -> Iterator[StepBatch]:
    """Return the iterator over this rank's batches. Local."""
    engine = trial.engine
    source = engine.parts.source
    tokenizer = load_tokenizer(source, trust_remote_code=engine.config.trust_remote_code)
    positions = read_model_config(str(source)).get("max_position_embeddings")
    return iterate_batches(
        trial.spec.workload,
        documents,
        choose_encoder(tokenizer),
        dp_rank=engine.data_parallel_rank,
        dp_size=engine.data_parallel_world_size,
        vocab_size=engine.model_facts.vocab_size,
        longest=positions or sys.maxsize,
    )


def train(trial: Trial, device: Device, batches: Iterator[StepBatch]) -> None:
    """Run all steps, timed and logged. Collective over: the world."""
    engine, spec, rank = trial.engine, trial.spec, trial.ranks.rank
    fault = parse_fault(spec.fault) if spec.fault else None
    facts, config = engine.model_facts, engine.config
    num_adapter_weights = 0
    if config.use_lora:
        num_adapter_weights = count_adapter_weights(config.target_modules, config.lora_rank, facts)

    def allocate(num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)

    with StepLog(trial.folder.steps_path) as log:
        for step, batch in enumerate(batches):
            trial.errors.enter("before_step", step)
            if step == spec.workload.warmup_steps:
                set_aside_objects()  # what the warm-up left: optimizer states, caches
            strike_fault(fault, FaultContext(rank, step, allocate))
            trial.errors.enter("step", step)

            def run(tensors: Mapping[str, torch.Tensor] = batch.tensors) -> dict[str, float]:
                with engine.tracer.span(STEP_SPAN, "other"):
                    return engine.train_lm(tensors)

            stats, seconds = time_step(run, device.synchronize)
            engine.lr_scheduler_step()
            record = StepRecord(
                step=step,
                seconds=seconds,
                loss=stats["loss"],
                grad_norm=stats["grad_norm"],
                num_tokens=batch.num_tokens,
                warmup=step < spec.workload.warmup_steps,
            )
            trial.steps.append(record)
            lengths = [length for lengths in batch.sequence_lengths for length in lengths]
            trial.step_flops.append(count_step_flops(facts, lengths, num_adapter_weights))
            if rank == 0:
                log.append(record)


def finish(trial: Trial) -> None:
    """Gather peaks, save traces and write the outcome on rank 0. Collective over: the world."""
    engine, folder = trial.engine, trial.folder
    if trial.nvml is not None and trial.nvml.unavailable is None:
        trial.nvml.sample()  # so that the peak counts the end of a short trial
    trace = engine.save_perf_tracer()
    own = (trial.measure_peaks(), None if trace is None else str(trace))
    gathered: list[Any] = [None] * trial.ranks.world_size
    dist.all_gather_object(gathered, own, group=engine.cpu_group)
    if trial.ranks.rank != 0:
        return
    merge_chrome_trace([path for _, path in gathered if path], folder.trace_path)
    phases = summarise_phases(engine.tracer.events(), trial.spec.workload.warmup_steps)
    measurement = trial.describe([peaks for peaks, _ in gathered], phases)
    save_first_outcome(folder, build_outcome(measurement))


def measure_memory(trial: Trial) -> dict[str, Any]:
    """Return this rank's memory figures for its last words. Local."""
    memory = read_device_memory(trial.engine)
    return {
        **trial.host.sample(),
        "peak_host_bytes": trial.host.measure_peak(),
        "device": None if memory is None else vars(memory),
    }


def read_device_memory(engine: FSDPLMEngine) -> DeviceMemory | None:
    """Return the allocator's figures; None where there is no allocator, or no answer from it."""
    try:
        memory = engine.get_device_stats()
    except RuntimeError:  # a device in an error state answers no question
        return None
    return None if memory.total_bytes is None else memory


def find_gpu_uuid(device: Device) -> str | None:
    """Return the driver's name of this rank's GPU; None without one."""
    if device.type != "cuda":
        return None
    return f"GPU-{torch.cuda.get_device_properties(device.torch_device).uuid}"


def describe_torch(device: str, nvml: NvmlRecorder | None) -> dict[str, Any]:
    """Return what only a process with torch knows of its environment."""
    facts: dict[str, Any] = {"torch": torch.__version__, "num_threads": torch.get_num_threads()}
    if device == "cuda":
        facts["cuda"] = torch.version.cuda
        version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        facts["nccl"] = ".".join(map(str, version))
        facts["gpu"] = torch.cuda.get_device_name()
        facts["gpu_total_bytes"] = torch.cuda.get_device_properties().total_memory
    if nvml is not None:
        facts["nvml"] = nvml.unavailable or nvml.missing or "ok"
    return facts


def end_without_teardown() -> None:
    """End a failed process at once: Python's teardown may wait for collectives that are stuck."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def main(arguments: Sequence[str]) -> int:
    """Run the trial in the folder that the only argument names."""
    if len(arguments) != 1:
        print("usage: python -m fsdpbench.bench.worker TRIAL_DIR", file=sys.stderr)
        return 2
    folder = TrialFolder(Path(arguments[0]))
    ranks = read_ranks()
    configure_logging(ranks.rank)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the runner asks a hanging rank
    with RankErrors(folder, ranks.rank) as errors:
        errors.enter("start")
        run_trial(folder.load_spec(), folder, ranks, errors)
    return 0


if __name__ == "__main__":
    atexit.register(end_without_teardown)  # runs when the error has been printed
    exit_code = main(sys.argv[1:])
    atexit.unregister(end_without_teardown)
    sys.exit(exit_code)
