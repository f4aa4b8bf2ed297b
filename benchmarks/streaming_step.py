"""The per-layer optimizer step on one GPU against what the bus allows. Numbers for the lab book.

    python benchmarks/streaming_step.py --preset qwen3-1.7b [--offload-params] [--prefetch 1]

Shapes of a preset, fp32; clipping included everywhere. Bandwidth of
page-locked copies, both ways at once, is measured in the same run: the limit is the larger of the
bytes in and out over it. On a machine without a GPU it runs and its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import time
from collections.abc import Callable, Iterable

import torch

from fsdpbench.engine.config.optimizer import OptimizerConfig
from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.device import Device
from fsdpbench.engine.host_memory import HostRegions
from fsdpbench.engine.models.load import build_meta_model, resolve_path
from fsdpbench.engine.optim.build import build_optimizer
from fsdpbench.engine.optim.clip import gradient_norm, plan_clipping
from fsdpbench.engine.optim.sharded import ShardedOptimizer

COPY_BYTES = 1 << 30
LAYER = re.compile(r"\blayers\.(\d+)\.")
Named = dict[str, torch.nn.Parameter]
Make = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="qwen3-1.7b")
    parser.add_argument("--prefetch", type=int, default=1)
    parser.add_argument("--offload-params", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--skip-others", action="store_true", help="the streamed step alone")
    arguments = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = Device("cuda", 0) if gpu else Device("cpu")
    device.make_current()
    shapes = read_shapes(arguments.preset)
    result: dict[str, object] = {"preset": arguments.preset, "prefetch": arguments.prefetch}
    result["offload_params"] = arguments.offload_params
    result["parameters"] = sum(shape.numel() for shape in shapes.values())
    bandwidth = measure_bandwidth(device)
    result["copy_gb_per_second_each_way"] = bandwidth / 1e9
    result |= measure_streamed(shapes, device, bandwidth, arguments)
    if not arguments.skip_others:
        release(device)
        result["device_clip_and_step_seconds"] = time_on_device(shapes, device, arguments.steps)
        release(device)
        result["cpu_adamw_seconds"] = time_on_cpu(shapes)
        streamed = float(str(result["streamed_step_seconds"]))
        result["times_faster_than_cpu"] = float(str(result["cpu_adamw_seconds"])) / streamed
    print(json.dumps(result, indent=1))


def read_shapes(preset: str) -> dict[str, torch.Size]:
    """Return the shapes of a preset's parameters by name."""
    config = TrainEngineConfig(path=preset, init_from_scratch=True)
    model = build_meta_model(config, resolve_path(config))
    return {name: parameter.shape for name, parameter in model.named_hf_parameters()}


def make_params(shapes: dict[str, torch.Size], make: Make) -> Named:
    """Make weights and gradients; `make` says where they lie."""
    named = {}
    for name, shape in shapes.items():
        named[name] = torch.nn.Parameter(make(tuple(shape), torch.float32).fill_(1e-3))
        named[name].grad = make(tuple(shape), torch.float32).fill_(1e-3)
    return named


def make_on(device: Device) -> Make:
    """Return what makes tensors in the memory of a device."""
    return lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device.torch_device)


def find_layers(named: Named) -> list[list[torch.nn.Parameter]]:
    """Group the parameters by the decoder layer in their names."""
    layers: dict[str, list[torch.nn.Parameter]] = {}
    for name, param in named.items():
        found = LAYER.search(name)
        if found:
            layers.setdefault(found[1], []).append(param)
    return list(layers.values())


def measure_bandwidth(device: Device) -> float:
    """Return bytes per second each way of page-locked copies that run both ways at once."""
    regions = HostRegions(device)
    outward, inward = (regions.allocate((COPY_BYTES,), torch.uint8) for _ in range(2))
    there, back = (
        torch.empty(COPY_BYTES, dtype=torch.uint8, device=device.torch_device) for _ in range(2)
    )
    regions.wait()
    streams = device.stream(), device.stream()

    def copy() -> None:
        with device.use_stream(streams[0]):
            there.copy_(outward, non_blocking=True)
        with device.use_stream(streams[1]):
            inward.copy_(back, non_blocking=True)

    seconds = time_of(copy, device, 8)
    regions.close()
    return COPY_BYTES / seconds


def time_of(work: Callable[[], object], device: Device, rounds: int) -> float:
    """Return the median seconds of a call, the device's work included, after one warm-up."""
    samples = []
    for _ in range(rounds + 1):
        device.synchronize()
        started = time.perf_counter()
        work()
        device.synchronize()
        samples.append(time.perf_counter() - started)
    return statistics.median(samples[1:])


def clip_and_step(
    params: Iterable[torch.nn.Parameter], optimizer: ShardedOptimizer, device: Device
) -> None:
    """Take a step as the engine does."""
    norm = gradient_norm(params, 2.0, device.torch_device)
    optimizer.step(clip=plan_clipping(norm, 1.0))


def measure_streamed(
    shapes: dict[str, torch.Size],
    device: Device,
    bandwidth: float,
    arguments: argparse.Namespace,
) -> dict[str, object]:
    """Time the streamed step and compare it with the limit; its memory in blocks."""
    offload = arguments.offload_params
    regions = HostRegions(device)
    named = make_params(shapes, regions.allocate if offload else make_on(device))
    regions.wait()
    params, layers = list(named.values()), find_layers(named)
    started = time.perf_counter()
    optimizer = build_optimizer(
        named.items(),
        OptimizerConfig(),
        blocks=layers,
        device=device,
        prefetch_layers=arguments.prefetch,
    )
    built = time.perf_counter() - started
    clip_and_step(params, optimizer, device)
    first = time.perf_counter() - started
    norm_seconds = time_of(
        lambda: gradient_norm(params, 2.0, device.torch_device), device, arguments.steps
    )
    device.synchronize()
    resting = device.memory_stats().allocated_bytes
    device.reset_peaks()
    optimizer.step()
    peak = device.memory_stats().peak_allocated_bytes - resting
    seconds = time_of(lambda: optimizer.step(), device, arguments.steps)
    together = time_of(lambda: clip_and_step(params, optimizer, device), device, arguments.steps)
    numel = sum(param.numel() for param in params)
    limit = numel * (16 if offload else 8) / bandwidth  # moments, and weights and gradients in
    block_bytes = 16 * max(sum(param.numel() for param in layer) for layer in layers)
    return {
        "build_seconds": built,
        "build_and_first_step_seconds": first,
        "norm_seconds": norm_seconds,
        "streamed_step_seconds": seconds,
        "streamed_clip_and_step_seconds": together,
        "limit_seconds": limit,
        "step_over_limit": seconds / limit,
        "block_gib": block_bytes / 2**30,
        "peak_above_resting_blocks": peak / block_bytes,
    }


def release(device: Device) -> None:
    """Give back what the last measurement held."""
    gc.collect()
    device.empty_cache()


def time_on_device(shapes: dict[str, torch.Size], device: Device, steps: int) -> float:
    """Time fused AdamW on the device, clipping included."""
    named = make_params(shapes, make_on(device))
    params = list(named.values())
    optimizer = build_optimizer(named.items(), OptimizerConfig())
    return time_of(lambda: clip_and_step(params, optimizer, device), device, steps)


def time_on_cpu(shapes: dict[str, torch.Size]) -> float:
    """Time torch's fused AdamW on the CPU, clipping included."""
    params = list(make_params(shapes, make_on(Device("cpu"))).values())
    adamw = torch.optim.AdamW(params, fused=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        adamw.step()

    return time_of(step, Device("cpu"), 2)


if __name__ == "__main__":
    main()
