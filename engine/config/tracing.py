"""Settings of the tracer; what they steer is in `engine.tracing`."""

from __future__ import annotations

from fsdpbench.engine.config.strict import Count, Flag, StrictModel


class PerfTracerConfig(StrictModel):
    """Whether and where the engine records the spans of its steps."""

    enabled: Flag = False
    """Record spans; off, a span costs next to nothing."""
    output_dir: str = "traces"
    """Folder for one file per rank, `rank<k>.jsonl`, and the merged `trace.json`."""
    max_events: Count = 100_000
    """Spans kept per rank between two clearings; later ones are counted and dropped."""
