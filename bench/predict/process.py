"""Simulations in a process of their own: requests on stdin, answers on stdout, a JSON line each.

    echo '{"config": {...}, "workload": {...}, "world_size": 8}' |
        python -m fsdpbench.bench.predict.process

A request holds `config` (fields of TrainEngineConfig), `workload` (of WorkloadSpec),
`world_size`, and optionally `rank`, `architecture` (null: kernels take no workspace) and `events`
(true: send every event, too). The answer holds `error` (and the exit
code is 1), or the trace and the replay's figures.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fsdpbench.bench.predict.allocator import replay
from fsdpbench.bench.predict.simulate import simulate
from fsdpbench.bench.predict.trace import PhasePeak, Trace
from fsdpbench.bench.predict.workspaces import Architecture
from fsdpbench.bench.records import WorkloadSpec
from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.errors import FsdpbenchError


class Request(BaseModel):
    """What to simulate."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: TrainEngineConfig
    workload: WorkloadSpec
    world_size: int = Field(ge=1)
    rank: int = Field(default=0, ge=0)
    architecture: Architecture | None = "sm90"
    events: bool = False


def answer(text: str) -> dict[str, Any]:
    """Carry a request out."""
    request = Request.model_validate_json(text)
    trace = simulate(
        request.config,
        request.workload,
        world_size=request.world_size,
        rank=request.rank,
        architecture=request.architecture,
    )
    return describe(trace, with_events=request.events)


def describe(trace: Trace, *, with_events: bool) -> dict[str, Any]:
    """Write a trace as JSON can hold it, with what the allocator would make of it."""
    replayed = replay(trace.events)
    described = {
        "rank": trace.rank,
        "world_size": trace.world_size,
        "method": "full",
        "attention_kernel": trace.attention_kernel,
        "peak_device_bytes": replayed.peak_allocated_bytes,
        "peak_reserved_bytes": replayed.peak_reserved_bytes,
        "peak_phase": describe_phase(trace.peak_phase),
        "phases": [describe_phase(phase) for phase in trace.phases],
        "notes": trace.notes,
    }
    return described | ({"events": trace.events} if with_events else {})


def describe_phase(phase: PhasePeak) -> dict[str, Any]:
    """Write one phase with plain names."""
    return {**vars(phase), "split": {str(name): size for name, size in phase.split.items()}}


def main() -> int:
    """Answer requests until there are no more; return 1 if one was refused."""
    exit_code = 0
    for text in sys.stdin:
        try:
            described = answer(text)
        except (FsdpbenchError, ValidationError) as error:
            described, exit_code = {"error": str(error)}, 1
        print(json.dumps(described), flush=True)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
