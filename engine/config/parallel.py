"""Parallel degrees and the backend string that spells them (`fsdp:d4c2t1`).

Only arithmetic over the degrees lives here; what the world size or the model adds is in
`fsdpbench.engine.topology`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fsdpbench.engine.config.strict import Count, StrictModel, rule
from fsdpbench.errors import ConfigError, Violation

ENGINE_SELECTION = {
    "moe": "mixture-of-experts models need an Archon-like engine",
    "pipeline": "pipeline parallelism needs a Megatron-like engine",
}
# letter of the backend string -> field; the order is the one in which strings are written
AXIS_LETTERS = {
    "d": "data_parallel_size",
    "p": "pipeline_parallel_size",
    "c": "context_parallel_size",
    "t": "tensor_parallel_size",
    "e": "expert_parallel_size",
}
ENGINES = ("fsdp",)
FOREIGN_ENGINES = {"megatron": "pipeline", "archon": "moe"}  # why one would choose them


class ParallelStrategy(StrictModel):
    """Degrees of the parallel axes; the expert axes fold into the others."""

    tensor_parallel_size: Count = 1
    """Ranks that share each weight matrix; 1 disables tensor parallelism."""
    pipeline_parallel_size: Count = 1
    """Stages that the layers are cut into; 1 disables pipeline parallelism."""
    data_parallel_size: Count = 1
    """Groups of ranks that see different sequences; weights are sharded over them."""
    context_parallel_size: Count = 1
    """Ranks that share each sequence; 1 disables context parallelism."""
    expert_parallel_size: Count = 1
    """Ranks that share the experts of a mixture-of-experts layer; 1 disables it."""
    expert_tensor_parallel_size: Count = 1
    """Ranks that share each expert's matrices; used when expert_parallel_size > 1."""

    @property
    def world_size(self) -> int:
        """Ranks in all; expert degrees reuse ranks of the other axes."""
        return self.dp_size * self.cp_size * self.tp_size * self.pp_size

    @property
    def tp_size(self) -> int:
        """Short for tensor_parallel_size."""
        return self.tensor_parallel_size

    @property
    def pp_size(self) -> int:
        """Short for pipeline_parallel_size."""
        return self.pipeline_parallel_size

    @property
    def dp_size(self) -> int:
        """Short for data_parallel_size."""
        return self.data_parallel_size

    @property
    def cp_size(self) -> int:
        """Short for context_parallel_size."""
        return self.context_parallel_size

    @rule(
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "context_parallel_size",
        "expert_parallel_size",
        "expert_tensor_parallel_size",
    )
    def _experts_divide_the_world(self) -> Violation | None:
        if self.expert_parallel_size == 1:
            return None
        ranks = self.pp_size * self.expert_tensor_parallel_size * self.expert_parallel_size
        if self.world_size % ranks == 0:
            return None
        return Violation(
            "expert_parallel_size",
            str(self.expert_parallel_size),
            f"the world of {self.world_size} ranks must be divisible by pipeline_parallel_size "
            f"{self.pp_size} x expert_tensor_parallel_size {self.expert_tensor_parallel_size} x "
            f"expert_parallel_size {self.expert_parallel_size} = {ranks}",
            "change one of the degrees",
        )


class FSDPParallelStrategy(ParallelStrategy):
    """What the FSDP engine runs: tensor, data and context axes; the others stay 1."""

    @rule("pipeline_parallel_size")
    def _no_pipeline(self) -> Violation | None:
        if self.pipeline_parallel_size == 1:
            return None
        return Violation(
            "pipeline_parallel_size",
            str(self.pipeline_parallel_size),
            f"the FSDP engine has no pipeline: {ENGINE_SELECTION['pipeline']}",
            "set it to 1 and use data_parallel_size, tensor_parallel_size or fsdp.offload_params",
        )

    @rule("expert_parallel_size", "expert_tensor_parallel_size")
    def _no_experts(self) -> Violation | None:
        for name in ("expert_parallel_size", "expert_tensor_parallel_size"):
            if getattr(self, name) > 1:
                return Violation(
                    name,
                    str(getattr(self, name)),
                    f"the FSDP engine trains dense models: {ENGINE_SELECTION['moe']}",
                    "set it to 1",
                )
        return None


@dataclass(frozen=True)
class Backend:
    """A parsed backend string."""

    engine: str
    strategy: FSDPParallelStrategy


def parse_backend(text: str) -> Backend:
    """Read `fsdp:d4c2t1`; a letter left out means 1, `p` and `e` may only be 1.

    Every violation of the ConfigError names its position in the string, counted from 0.
    """
    engine, colon, _ = text.partition(":")
    if not colon or engine not in ENGINES:
        choice = FOREIGN_ENGINES.get(engine)
        reason = f"; {engine} is another system: {ENGINE_SELECTION[choice]}" if choice else ""
        raise ConfigError([_refuse(text, 0, f"must start with fsdp:{reason}")])
    degrees, positions = _read_degrees(text, len(engine) + 1)
    try:
        return Backend(engine, FSDPParallelStrategy(**degrees))
    except ConfigError as error:
        raise ConfigError(
            [
                _refuse(text, positions[v.where], f"{v.where}={v.found}: {v.allowed}", v.remedy)
                for v in error.violations
            ]
        ) from None


def _read_degrees(text: str, start: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return field -> degree and field -> position of its letter."""
    degrees: dict[str, int] = {}
    positions: dict[str, int] = {}
    problems = [] if text[start:] else [_refuse(text, start, "no degree is given")]
    for match in re.compile(r"[^0-9][0-9]{0,9}|[0-9]+").finditer(text, start):
        letter, digits, at = match.group()[0], match.group()[1:], match.start()
        field = AXIS_LETTERS.get(letter)
        if field is None:
            known = ", ".join(AXIS_LETTERS)
            problems.append(_refuse(text, at, f"{letter!r} is no axis; use {known}"))
        elif field in degrees:
            problems.append(_refuse(text, at, f"axis {letter!r} is given twice"))
        elif not digits or int(digits) < 1:
            problems.append(_refuse(text, at + 1, f"axis {letter!r} needs a degree of 1 or more"))
        else:
            degrees[field], positions[field] = int(digits), at
    if problems:
        raise ConfigError(problems)
    return degrees, positions


def format_backend(strategy: ParallelStrategy, engine: str = "fsdp") -> str:
    """Write the string that `parse_backend` reads back; `p` and `e` appear only above 1."""
    parts = [
        f"{letter}{getattr(strategy, name)}"
        for letter, name in AXIS_LETTERS.items()
        if letter in "dct" or getattr(strategy, name) > 1
    ]
    return f"{engine}:{''.join(parts)}"


EXAMPLE = "write fsdp:d<data>c<context>t<tensor>, for example fsdp:d4c2t1"


def _refuse(text: str, position: int, problem: str, remedy: str = EXAMPLE) -> Violation:
    return Violation("backend", repr(text), f"at position {position}: {problem}", remedy)
